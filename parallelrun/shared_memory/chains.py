"""Collectives in stages over several hosts: each stage is in shared memory or over gloo, and begins after the last one.

The stages of all collectives of a group are issued in the same order on every rank. The first stage of a collective is
issued when it is called. The others wait until all stages of the collectives before it are issued.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from parallelrun.shared_memory.channel import CollectiveChannel
from parallelrun.shared_memory.engine import SAFETY_S, STALLED_S, Engine, PendingOperation
from parallelrun.shared_memory.process import ANY, Peer
from parallelrun.shared_memory.reductions import Reduction
from parallelrun.shared_memory.shared_collective import SharedCollective
from parallelrun.shared_memory.tensors import as_bytes, num_bytes_of

Stage = Callable[[], Iterable[PendingOperation]]  # issues operations and returns them


class BetweenHosts:
    """Answers of an `engine.PendingOperation` whose peers are all on other hosts, where gloo watches them."""

    def missing(self) -> list[Peer]:
        """Return none: its peers are on other hosts."""
        return []

    def sleep(self) -> tuple[int, float]:
        """See `engine.PendingOperation`."""
        return ANY, SAFETY_S

    def closed(self, peer: Peer) -> bool:
        """Return False: its peers are on other hosts."""
        return False


class GlooOperation(BetweenHosts):
    """A collective over gloo. A thread of gloo ends it, calls `finish` and advances what follows."""

    def __init__(
        self, engine: Engine, work: Any, tensors: Sequence[Tensor] = (), finish: Callable[[], None] | None = None
    ):
        self.done = False
        self.error: Exception | None = None
        self._engine, self._tensors = engine, tensors  # gloo does not keep them alive
        self._finish = finish
        work.get_future().then(self._end)

    def _end(self, future: Any) -> None:
        error = None
        try:
            future.value()
            if self._finish is not None:
                self._finish()
        except RuntimeError as raised:
            error = raised
        self.error = error
        self.done = True
        self._engine.process.ring()  # whoever has the lock may sleep with it
        if self._engine.lock.acquire(blocking=False):
            try:
                self._engine.progress()
                self._engine.lock.notify_all()
            finally:
                self._engine.lock.release()
            self._engine.process.ring()


class GlooLink:
    """The collectives between hosts over a gloo group. num_bytes: what this rank has sent to others."""

    def __init__(self, engine: Engine, group: Any):
        self._engine = engine
        self.group: Any = group
        self.num_bytes = 0

    def exchange(
        self, target: Tensor, arriving: Sequence[int], source: Tensor, leaving: Sequence[int]
    ) -> GlooOperation:
        """Send parts of `source` to the members in turn, and receive theirs into `target`. Both are contiguous.

        arriving, leaving: bytes from and to each member.
        """
        received, sent = as_bytes(target), as_bytes(source)
        self.num_bytes += sum(leaving) - leaving[self.group.rank()]
        work = self.group.alltoall_base(received, sent, list(arriving), list(leaving))
        return GlooOperation(self._engine, work, (received, sent))

    def add(self, tensor: Tensor) -> GlooOperation:
        """Set a contiguous tensor to its sum over all members, around a ring."""
        self.num_bytes += 2 * (self.group.size() - 1) * num_bytes_of(tensor) // self.group.size()
        return GlooOperation(self._engine, self.group.allreduce([tensor]), (tensor,))

    def broadcast(self, tensor: Tensor, root: int) -> GlooOperation:
        """Send a contiguous tensor of member `root` to all others."""
        if root == self.group.rank():
            self.num_bytes += tensor.numel() * tensor.element_size() * (self.group.size() - 1)
        held = as_bytes(tensor)
        return GlooOperation(self._engine, self.group.broadcast(held, root), (held,))

    def share(self, parts: Sequence[Tensor]) -> GlooOperation:
        """Send this member's tensor to all others, and receive theirs, around a ring. parts: one per member, flat, of
        any sizes.

        Every port is busy all the time. Broadcasts in turn would use one member's port after the other.
        """
        rank, largest = self.group.rank(), max(map(num_bytes_of, parts))
        self.num_bytes += largest * (self.group.size() - 1)
        own = as_bytes(parts[rank])
        padded = own if len(own) == largest else torch.cat([own, own.new_empty(largest - len(own))])
        gathered = [as_bytes(part) if num_bytes_of(part) == largest else own.new_empty(largest) for part in parts]

        def place() -> None:
            for part, arrived in zip(parts, gathered):
                if len(arrived) > num_bytes_of(part):
                    as_bytes(part).copy_(arrived[: num_bytes_of(part)])

        return GlooOperation(self._engine, self.group.allgather([gathered], [padded]), (*gathered, padded), place)

    def barrier(self) -> GlooOperation:
        return GlooOperation(self._engine, self.group.barrier())

    def close(self) -> None:
        """Close the connections, so that the others do not wait for this rank.

        gloo does so when the last reference ends, after the operations under way. So a thread of its own waits for it.
        """
        held, self.group = [self.group], None
        threading.Thread(target=held.clear, daemon=True).start()


class Chain:
    """A collective in stages."""

    def __init__(self, name: str, num_bytes: int, stages: Iterable[Stage]):
        self.name, self.num_bytes = name, num_bytes
        self.number = 0  # among the collectives of its group, from 1
        self.done = False
        self.error: Exception | None = None
        self._stages = deque(stages)
        self._pending: list[PendingOperation] = []

    @property
    def is_issued(self) -> bool:
        """Return whether no stage is left to issue."""
        return not self._stages

    def issue_next(self) -> None:
        self._pending = list(self._stages.popleft()())

    def is_ready(self) -> bool:
        """Return whether the stage that was issued last has ended. Raises its error."""
        for operation in self._pending:
            if not operation.done:
                return False
            if operation.error is not None:
                raise operation.error
        return True

    def missing(self) -> list[Peer]:
        """Return the peers of this host without which the present stage cannot end."""
        return [peer for one in self._pending if not one.done for peer in one.missing()]

    def sleep(self) -> tuple[int, float]:
        """See `engine.PendingOperation`."""
        return ANY, min((one.sleep()[1] for one in self._pending if not one.done), default=STALLED_S)

    def closed(self, peer: Peer) -> bool:
        """Return whether a peer of this host has left the group."""
        return any(one.closed(peer) for one in self._pending)

    def __str__(self) -> str:
        return f"{self.name} of {self.num_bytes} bytes over several hosts"


def sum_around_ring(link: GlooLink, flat: Tensor, reduction: Reduction) -> Chain:
    """Return the all-reduce of large tensors among more than two hosts of one rank each.

    A port has one stream then. Parts that are exchanged at once leave ports idle at the end (benchmarks/emulated.py).
    """
    nothing: Stage = tuple  # first stages have no order among the chains, and the link needs one
    total = partial(reduction.total, flat, [flat], link.group.size())
    return Chain("all_reduce", num_bytes_of(flat), (nothing, lambda: [link.add(flat)], lambda: total() or ()))


def together(stages: Iterable[Stage]) -> list[PendingOperation]:
    """Issue several stages as one."""
    return [operation for stage in stages for operation in stage()]


def issue(channel: CollectiveChannel, collective: SharedCollective) -> list[SharedCollective]:
    """Issue a collective within the host, as a stage."""
    channel.issue(collective)
    return [collective]


class ChainQueue:
    """The collectives of a group over several hosts in one process. Every method is called under the engine's lock.

    channels: within the host, of the first stages and of the last ones. links: of all gloo groups.
    """

    def __init__(self, engine: Engine, channels: Sequence[CollectiveChannel], links: Sequence[GlooLink]):
        self._engine, self._channels, self._links = engine, channels, links
        self._queue: deque[Chain] = deque()
        self.num_issued = 0
        self._failed: Exception | None = None
        self._is_advancing = False

    def issue(self, chain: Chain) -> None:
        """Issue the first stage of a collective, and what can follow at once."""
        self.num_issued += 1
        chain.number = self.num_issued
        self._queue.append(chain)
        if self._failed is None:
            self._guarded(chain.issue_next)
        self._engine.submit(self)

    def advance(self) -> bool:
        """See `engine.OperationQueue`."""
        if not self._is_advancing:  # issuing a stage advances all queues
            if self._failed is None:
                self._guarded(self._advance)
            if self._failed is not None:
                self._fail(self._failed)
            while self._queue and self._queue[0].done:
                self._queue.popleft()
        return bool(self._queue)

    def is_owing(self) -> bool:
        """See `engine.OperationQueue`."""
        return bool(self._queue)

    def outstanding(self, operation: PendingOperation) -> tuple[int, tuple[int, ...] | None] | None:
        """See `CollectiveChannel.outstanding`."""
        return next(((one.number, None) for one in tuple(self._queue) if one is operation), None)

    def missing(self) -> list[Peer]:
        """See `engine.OperationQueue`."""
        return self._queue[0].missing() if self._queue else []

    def close(self) -> None:
        """Tell the members of this host that this one has left."""
        for channel in self._channels:
            channel.close()

    def disconnect(self) -> None:
        """Let the members on other hosts know that this one is lost."""
        links, self._links = self._links, ()
        for link in links:
            link.close()

    def _guarded(self, step: Callable[[], None]) -> None:
        self._is_advancing = True
        try:
            step()
        except Exception as error:  # whoever waits for one of them is told; what follows could not be matched
            self._failed = error
        finally:
            self._is_advancing = False

    def _advance(self) -> None:
        for channel in self._channels:
            channel.advance()
        may_issue = True
        for chain in self._queue:
            while not chain.done and chain.is_ready():
                if chain.is_issued:
                    chain.done = True
                elif may_issue:
                    chain.issue_next()
                else:
                    break
            may_issue = may_issue and chain.is_issued
            self._look_for_ended_peers(chain)

    def _look_for_ended_peers(self, chain: Chain) -> None:
        """Raise RuntimeError if a collective needs a peer that has ended: other hosts must not wait for this rank."""
        lost = [] if chain.done else [peer for peer in chain.missing() if peer.gone or chain.closed(peer)]
        if lost:
            for channel in self._channels:  # it may have done its part at the last moment
                channel.advance()
            if lost[0] in chain.missing():
                raise RuntimeError(f"[shared memory] Connection closed by peer: process {lost[0].pid}, {chain}")

    def _fail(self, error: Exception) -> None:
        """End all collectives, and let the members on this host and elsewhere know that this one is lost."""
        for chain in self._queue:
            if not chain.done:
                chain.error, chain.done = error, True
        if self._links:
            self.close()
            self.disconnect()
