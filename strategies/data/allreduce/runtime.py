"""All-reduce by the tables of `steps`, on point-to-point messages that are counted like everything else.

    all_reduce(buffer, group, "gradients", "ring", async_op=True).wait()

On gloo a thread per process group carries out what is started, in order; messages are cut in pieces, so that a piece
travels on while the next one arrives and is added. On CUDA the rounds are enqueued on a stream of their own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from parallelrun import comm
from parallelrun.comm import Waitable
from parallelrun.mesh import Group

from .jobs import Queue
from .steps import ALL_GATHER, NATIVE, SCATTER_REDUCE, Message, Round, Span, piece_elements, pieces, table

# A thread or a stream belongs to its process group, and goes with it; callers only know the group.
_lanes: WeakKeyDictionary[dist.ProcessGroup, _Lane] = WeakKeyDictionary()
_streams: WeakKeyDictionary[dist.ProcessGroup, torch.cuda.Stream] = WeakKeyDictionary()


def all_reduce(
    tensor: Tensor, group: Group, purpose: str, algorithm: str = NATIVE, async_op: bool = False, group_size: int = 1
) -> Waitable | None:
    """Sum the contiguous `tensor` over the group, in place; every member ends with the same bits.

    algorithm: native | ring | halving_doubling | tree | hierarchical (group_size: members of an inner group, which
    divides the group's size). async_op: returns what to wait for (None on a group of one); until then the tensor may
    not be touched. Calls are carried out in their order, which must be the same on all members of the group.
    """
    if algorithm == NATIVE or group.size == 1:
        return comm.all_reduce(tensor, group, purpose, async_op=async_op)
    assert tensor.is_contiguous(), "its flat view is what is sent"
    rounds = table(algorithm, group.size, group.index, tensor.numel(), group_size)
    rounds = tuple(one for one in rounds if one.send or one.receive)
    started = (_on_stream if tensor.is_cuda else _on_thread)(tensor.view(-1), rounds, group, purpose)
    if async_op:
        return started
    started.wait()
    return None


def _on_thread(flat: Tensor, rounds: Sequence[Round], group: Group, purpose: str) -> Waitable:
    assert group.process_group is not None
    lane = _lanes.get(group.process_group)
    if lane is None:
        lane = _lanes[group.process_group] = _Lane(f"all-reduce over {group.axis}")
    return lane.queue.put(_Pieces(flat, rounds, group, purpose, lane.scratch).run)


class _Scratch:
    """Where what is to be added arrives. Kept, for fresh memory costs as much as the sum; only the thread uses it."""

    def __init__(self) -> None:
        self._held = torch.empty(0, dtype=torch.uint8)

    def rows(self, numel: int, like: Tensor) -> Tensor:
        """(2, numel) of like's dtype, whatever was there before."""
        wanted = 2 * numel * like.element_size()
        if self._held.numel() < wanted:
            self._held = torch.empty(wanted, dtype=torch.uint8)
        return self._held[:wanted].view(like.dtype).view(2, numel)


class _Lane:
    """What carries out the all-reduces of one process group on gloo."""

    def __init__(self, name: str):
        self.queue, self.scratch = Queue(name), _Scratch()


class _Pieces:
    """One all-reduce on gloo.

    Receives are posted a round ahead, so that no sender waits for its peer to look: gloo's messages are rendezvous.
    Nothing here waits for a send before the end: what overwrites a segment is a sum that has this rank's part in it, so
    the send of that part was over before. A send's round is known to all by the table: no deadlock can arise, for
    everyone posts its receives of a round before it waits for those of the round before.
    """

    def __init__(self, flat: Tensor, rounds: Sequence[Round], group: Group, purpose: str, scratch: _Scratch):
        self._flat, self._rounds, self._group, self._purpose = flat, rounds, group, purpose
        received = [one.receive.numel for one in rounds if one.phase == SCATTER_REDUCE and one.receive]
        self._longest, self._scratch = max(received, default=0), scratch
        self._piece = piece_elements(flat.element_size())
        self._sent: list[dist.Work] = []

    @torch.no_grad()
    def run(self) -> None:
        self._buffers = self._scratch.rows(self._longest, self._flat)
        arriving = self._post(0)
        self._send(self._pieces_to_send(0), self._flat.numel())
        for number, one in enumerate(self._rounds):
            posted, outgoing = self._post(number + 1), self._pieces_to_send(number + 1)
            if one.receive:
                self._send(outgoing, one.receive.start)
            for piece, buffer, work in arriving:
                work.wait()
                if one.phase == SCATTER_REDUCE:
                    self._flat[piece.start : piece.stop].add_(buffer)
                self._send(outgoing, piece.stop)
            self._send(outgoing, self._flat.numel())
            arriving = posted
        for work in self._sent:
            work.wait()

    def _post(self, number: int) -> list[tuple[Message, Tensor, dist.Work]]:
        """Start the receives of a round: into the tensor, or where they are added from."""
        if number >= len(self._rounds) or (message := self._rounds[number].receive) is None:
            return []
        into, offset = self._flat, 0
        if self._rounds[number].phase == SCATTER_REDUCE:
            into, offset = self._buffers[number % 2], message.start
        posted = []
        for piece in pieces(message, self._piece):
            buffer = into[piece.start - offset : piece.stop - offset]
            work = comm.irecv(buffer, piece.peer, self._group, self._purpose, comm.REDUCTION_TAG)
            posted.append((piece, buffer, work))
        return posted

    def _pieces_to_send(self, number: int) -> deque[Message]:
        message = self._rounds[number].send if number < len(self._rounds) else None
        return deque(pieces(message, self._piece)) if message else deque()

    def _send(self, outgoing: deque[Message], ready: int) -> None:
        """Start the sends of what lies before `ready`: all of that has arrived."""
        while outgoing and outgoing[0].stop <= ready:
            piece = outgoing.popleft()
            part = self._flat[piece.start : piece.stop]
            self._sent.append(comm.isend(part, piece.peer, self._group, self._purpose, comm.REDUCTION_TAG))


def _on_stream(flat: Tensor, rounds: Sequence[Round], group: Group, purpose: str) -> Waitable:
    """Enqueue all rounds behind what the current stream has enqueued; its `wait` makes that stream wait for them."""
    assert group.process_group is not None
    stream = _streams.get(group.process_group)
    if stream is None:
        stream = _streams[group.process_group] = torch.cuda.Stream(flat.device)
    stream.wait_stream(torch.cuda.current_stream(flat.device))
    flat.record_stream(stream)
    with torch.cuda.stream(stream), torch.no_grad():
        run_in_batches(flat, rounds, group, purpose)
    return _StreamWork(stream.record_event())


class _StreamWork:
    def __init__(self, event: torch.cuda.Event):
        self._event = event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)


def run_in_batches(flat: Tensor, rounds: Sequence[Round], group: Group, purpose: str) -> None:
    """A round at a time, whole messages, both directions as one batch: what NCCL wants. Works on gloo too."""
    for one in rounds:
        buffer, receives = flat[:0], []
        if one.receive is not None:
            place: Span = (one.receive.start, one.receive.stop)
            buffer = flat[slice(*place)] if one.phase == ALL_GATHER else flat.new_empty(one.receive.numel)
            receives = [(buffer, one.receive.peer)]
        sends = [(flat[one.send.start : one.send.stop], one.send.peer)] if one.send else []
        for work in comm.exchange(sends, receives, group, purpose):
            work.wait()
        if one.receive is not None and one.phase == SCATTER_REDUCE:
            flat[slice(*place)].add_(buffer)
