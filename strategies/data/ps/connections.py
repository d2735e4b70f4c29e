"""Point-to-point connections between workers and servers, and the flat buffers that they carry in CPU memory.

A receive of gloo can neither be polled nor cancelled. So a server has one thread per rank that waits in a blocking
receive, and workers send without waiting. NCCL, which has no tags, is used among workers only. Both ends derive from
the plan which elements a message has (`shards.pieces`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from parallelrun.distributed import comm, torch_private
from parallelrun.planner.contract.collective import Collective
from parallelrun.planner.contract.plan import Plan
from parallelrun.training.loop.flat_tensors import flat_views

from .protocol import AXIS, CONTROL, COUNTED, PULL, PUSH, ServerReply, WorkerRequest
from .shards import ShardPiece, pieces
from .store import PushedPart, ShardStore

Header = TypeVar("Header", WorkerRequest, ServerReply)
_TAGS = {CONTROL: 21, PUSH: 22, PULL: 23}
_FACTS = "parallelrun/ps/facts/{rank}"


def publish_facts(rank: int, facts: dict[str, Any]) -> None:
    """Tell worker 0 this rank's facts through the store: a collective would wait for lost ranks."""
    torch_private.default_store().set(_FACTS.format(rank=rank), json.dumps(facts))


def collect_facts(rank: int) -> dict[str, Any]:
    """Wait for the facts that a rank publishes."""
    return cast("dict[str, Any]", json.loads(torch_private.default_store().get(_FACTS.format(rank=rank))))


class PeerLost(RuntimeError):
    """The rank at the other end of a channel has exited."""


class Channel:
    """Headers and payloads between this process and the rank `peer`. Used by one thread."""

    def __init__(self, peer: int):
        self.peer = peer
        self._counted: list[Collective] = []
        self._sent: list[tuple[dist.Work | None, Tensor]] = []

    def send(self, tensor: Tensor, purpose: str) -> None:
        """Start to send a CPU tensor, which must not change until `flush`. Raises PeerLost."""
        assert tensor.is_contiguous() and tensor.device.type == "cpu"
        with self._guarded(), comm.label(AXIS, purpose):
            self._sent.append((dist.isend(tensor, dst=self.peer, tag=_TAGS[purpose]), tensor))
        self._counted.append(Collective(AXIS, "send", purpose, 1, tensor.nbytes))

    def send_header(self, header: WorkerRequest | ServerReply) -> None:
        """Start to send a header. Raises PeerLost."""
        self.send(torch.tensor([float(value) for value in header], dtype=torch.float64), CONTROL)

    def flush(self) -> list[Collective]:
        """Wait until the peer has received everything; return all messages since the last flush. Raises PeerLost.

        Channels count their own messages, because a `CommunicationCounter` sees those of its own thread only.
        """
        with self._guarded():
            for work, _ in self._sent:
                if work is not None:
                    work.wait()
        self._sent.clear()
        counted, self._counted = self._counted, []
        return counted

    def receive(self, into: Tensor, purpose: str) -> Tensor:
        """Wait for a message of exactly that size. Raises PeerLost."""
        assert into.is_contiguous() and into.device.type == "cpu"
        with self._guarded(), comm.label(AXIS, purpose):
            dist.recv(into, src=self.peer, tag=_TAGS[purpose])
        self._counted.append(Collective(AXIS, "recv", purpose, 1, 0))
        return into

    def receive_header(self, kind: type[Header]) -> Header:
        """Wait for a header; its numbers get the types of the kind's defaults. Raises PeerLost."""
        values = self.receive(torch.empty(len(kind._fields), dtype=torch.float64), CONTROL).tolist()
        return kind(*(type(default)(value) for default, value in zip(kind._field_defaults.values(), values)))

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise PeerLost(f"the connection to rank {self.peer} is lost: {error}") from error


class RankConnection:
    """A server's end of the connection to one rank of a worker: the channel, one buffer per direction, and messages.

    pushed: the parts of the gradient that the rank pushes, each with its values in the buffer `push`. payload: the
    weights that are sent next. num_exchanges: pushes that were answered. messages: of the counted exchange.
    """

    def __init__(self, rank: int, plan: Plan, store: ShardStore):
        self.rank, self.worker = rank, plan.mesh.coordinate(rank)[plan.worker_axis]
        self.channel, self._weights = Channel(rank), store.weights
        pushed, pulled = pieces(plan, rank, store.shards)
        weights = [parameter.tensor for parameter in store.parameters]
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        self.push, self.pushed = _paired(store.gradient, gradients, pushed)
        self._pull, self._pulled = _paired(store.weights, weights, pulled)
        self.payload = self._pull
        self.num_exchanges = 0
        self.messages: list[Collective] = []

    def copy_weights(self, is_fixed: bool) -> None:
        """Make the weights as they are the payload. is_fixed: nothing changes them before they are received."""
        if is_fixed and self._pull.numel() == self._weights.numel():
            self.payload = self._weights
        else:
            torch_private.copy_all([values for _, values in self._pulled], [part for part, _ in self._pulled])

    def exchanged(self, messages: list[Collective]) -> None:
        """Count a push and its answer."""
        self.num_exchanges += 1
        if self.num_exchanges == COUNTED:
            self.messages = messages


class WorkerConnections:
    """The connections to all ranks of a worker, which act as one: each request is made by all of them, and the last to
    make it gets it done, so that they use weights of one version, and steps and staleness count once.

    requests: those of the ranks that wait for the others, by rank. turn: number of requests done. reply: to the last
    one. blocked_s: seconds for which the worker waited for answers to its pushes.
    """

    def __init__(self, index: int, connections: Sequence[RankConnection]):
        self.index, self.ranks = index, [connection for connection in connections if connection.worker == index]
        self.requests: dict[int, WorkerRequest] = {}
        self.turn, self.reply = 0, ServerReply()
        self.blocked_s = 0.0

    @property
    def pushed(self) -> list[PushedPart]:
        """The worker's gradient, each element once."""
        return [part for connection in self.ranks for part in connection.pushed]

    def request(self) -> WorkerRequest | None:
        """Take the worker's request, once all ranks have made it."""
        if len(self.requests) < len(self.ranks):
            return None
        requests = [self.requests.pop(connection.rank) for connection in self.ranks]
        return WorkerRequest.together(requests)

    def done(self, reply: ServerReply, is_fixed: bool) -> None:
        """Give every rank the reply, and the weights of its version."""
        self.turn, self.reply = self.turn + 1, reply
        for connection in self.ranks:
            connection.copy_weights(is_fixed)


def _paired(flat: Tensor, shards: Sequence[Tensor], own: Sequence[ShardPiece]) -> tuple[Tensor, list[PushedPart]]:
    """Return a buffer for pieces of the shards in `flat`, and each piece with its values in the buffer: one pair if
    they are all of `flat`."""
    buffer = flat.new_zeros(sum(piece.numel for piece in own))
    if buffer.numel() == flat.numel():
        return buffer, [(flat, buffer)]
    parts = [shards[piece.number][piece.in_shard] for piece in own]
    return buffer, list(zip(parts, flat_views(buffer, (piece.shape for piece in own))))
