"""Point-to-point connections between workers and servers, and the flat buffers that they carry in CPU memory.

A receive of gloo can neither be polled nor cancelled. So a server has one thread per worker that waits in a blocking
receive, and workers send without waiting. NCCL, which has no tags, is used among workers only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from parallelrun.distributed import comm, torch_private
from parallelrun.planner.contract.parameters import LocalParameter
from parallelrun.planner.contract.plan import Collective, Plan
from parallelrun.training.loop.flat_tensors import flat_views, flatten, unflatten

from .plan import sharding
from .protocol import AXIS, CONTROL, COUNTED, PULL, PUSH, Ask, ServerReply, WorkerRequest
from .shards import Shard

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


class WorkerConnection:
    """A server's end of the connection to one worker: the channel, one buffer per direction, and what it measures.

    num_exchanges: pushes that were answered. messages: of the counted exchange. blocked_s: seconds for which the worker
    waited for answers to its pushes.
    """

    def __init__(self, worker: int, weights: Tensor):
        self.worker, self.channel = worker, Channel(worker)
        self.push, self.pull = torch.zeros_like(weights), torch.zeros_like(weights)
        self.num_exchanges, self.blocked_s = 0, 0.0
        self.messages: list[Collective] = []

    def exchanged(self, messages: list[Collective]) -> None:
        """Count a push and its answer."""
        self.num_exchanges += 1
        if self.num_exchanges == COUNTED:
            self.messages = messages


class ShardBuffers:
    """A worker's flat CPU buffers, one per server and direction: gradients to push and weights as pulled."""

    def __init__(self, plan: Plan, parameters: Sequence[LocalParameter]):
        self._parameters = {parameter.name: parameter.tensor for parameter in parameters}
        self._by_server = sharding(plan).of_server
        self._shards = [shard for shards in self._by_server for shard in shards]
        numels = [sum(shard.numel for shard in shards) for shards in self._by_server]
        dtype = getattr(torch, plan.precision.stored)
        self.pushes, self.pulls = ([torch.zeros(numel, dtype=dtype) for numel in numels] for _ in range(2))
        self._push_views, self._pull_views = self._views(self.pushes), self._views(self.pulls)
        self._weights = [_rows(self._parameters[shard.name].detach(), shard) for shard in self._shards]

    def pack(self) -> None:
        """Copy the gradients into `pushes`."""
        gradients = {name: tensor.grad for name, tensor in self._parameters.items() if tensor.grad is not None}
        torch_private.copy_all(self._push_views, [_rows(gradients[shard.name], shard) for shard in self._shards])

    def unpack(self) -> None:
        """Copy `pulls` into the weights."""
        torch_private.copy_all(self._weights, self._pull_views)

    def by_name(self, flats: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the contents of buffers like `pulls` as logical tensors on the CPU."""
        values = {n: torch.empty_like(value, device="cpu").detach() for n, value in self._parameters.items()}
        for shard, view in zip(self._shards, self._views(flats)):
            _rows(values[shard.name], shard).copy_(view)
        return values

    def _views(self, flats: Sequence[Tensor]) -> list[Tensor]:
        return [v for flat, own in zip(flats, self._by_server) for v in flat_views(flat, (s.shape for s in own))]


def _rows(tensor: Tensor, shard: Shard) -> Tensor:
    return tensor[shard.start : shard.stop] if tensor.dim() else tensor


class ServerClient:
    """A worker's connections to all servers: pushes go to every server at once, pulls fill the module's weights.

    versions: of each server's weights, as last pulled.
    """

    def __init__(self, plan: Plan, parameters: Sequence[LocalParameter], frozen: Sequence[LocalParameter]):
        self.buffers = ShardBuffers(plan, parameters)
        self._frozen = [parameter.tensor.detach() for parameter in frozen]
        self._channels = [Channel(plan.num_workers + server) for server in range(plan.servers)]
        self.versions = [0] * plan.servers

    def read(self) -> ServerReply:
        """Pull the current weights; return the first server's reply."""
        return self._pull([WorkerRequest(Ask.READ)] * len(self._channels), [])

    def update(self, request: WorkerRequest) -> ServerReply:
        """Push the packed gradient and pull the weights once the servers allow it; return the first server's reply."""
        requests = [request._replace(ask=Ask.UPDATE, pulled=version) for version in self.versions]
        return self._pull(requests, self.buffers.pushes)

    def wait_at_barrier(self, request: WorkerRequest, waiting: Callable[[], None]) -> int:
        """Wait at a barrier (Ask.SAVE or Ask.END); return the step of a checkpoint that could not be written, or 0.

        waiting: called about once a second meanwhile.
        """
        for channel in self._channels:
            channel.send_header(request)
        pending, failed = self._channels, 0
        while pending:
            replies = [channel.receive_header(ServerReply) for channel in pending]
            failed = max(failed, *(reply.clock for reply in replies if reply.ready), 0)
            pending = [channel for channel, reply in zip(pending, replies) if not reply.ready]
            waiting()
        for channel in self._channels:
            channel.flush()
        return failed

    def read_frozen(self) -> None:
        """Take over the first server's values of the frozen parameters."""
        if self._frozen:
            flat = torch.empty(sum(tensor.numel() for tensor in self._frozen), dtype=self.buffers.pulls[0].dtype)
            self._exchange(self._channels[:1], [WorkerRequest(Ask.READ_FROZEN)], pulls=[flat])
            unflatten(flat, self._frozen)

    def keep_frozen(self) -> None:
        """Give the first server this worker's frozen parameters (running statistics), to be saved."""
        if self._frozen:
            flat = flatten(self._frozen).to("cpu", self.buffers.pulls[0].dtype)
            self._exchange(self._channels[:1], [WorkerRequest(Ask.KEEP_FROZEN)], pushes=[flat])

    def read_gradient(self, version: int) -> dict[str, Tensor]:
        """Return the gradient of the servers' update number `version`, by name (verify)."""
        flats = [torch.empty_like(pull) for pull in self.buffers.pulls]
        self._exchange(self._channels, [WorkerRequest(Ask.READ_GRADIENT, version)] * len(flats), pulls=flats)
        return self.buffers.by_name(flats)

    def leave(self) -> None:
        """Close the connections: the servers' threads for this worker end."""
        for channel in self._channels:
            channel.send_header(WorkerRequest(Ask.LEAVE))
        for channel in self._channels:
            channel.flush()

    def _pull(self, requests: Sequence[WorkerRequest], pushes: Sequence[Tensor]) -> ServerReply:
        replies = self._exchange(self._channels, requests, pushes, self.buffers.pulls)
        self.versions = [reply.version for reply in replies]
        self.buffers.unpack()
        return replies[0]

    def _exchange(
        self,
        channels: Sequence[Channel],
        requests: Sequence[WorkerRequest],
        pushes: Sequence[Tensor] = (),
        pulls: Sequence[Tensor] = (),
    ) -> list[ServerReply]:
        """Send every server a request (and its push), then receive its reply (and its pull)."""
        for number, (channel, request) in enumerate(zip(channels, requests)):
            channel.send_header(request)
            if pushes:
                channel.send(pushes[number], PUSH)
        replies = []
        for number, channel in enumerate(channels):
            replies.append(channel.receive_header(ServerReply))
            if pulls:
                channel.receive(pulls[number], PULL)
        for channel in channels:
            channel.flush()
        return replies
