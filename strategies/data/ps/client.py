"""The end of one rank of a worker: the flat buffers of its part of the model, and its connections to the servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from parallelrun.distributed import torch_private
from parallelrun.training.loop.build import Training
from parallelrun.training.loop.flat_tensors import flat_views, flatten, unflatten

from .connections import Channel
from .plan import frozen_shards, sharding
from .protocol import PULL, PUSH, Ask, ServerReply, WorkerRequest
from .shards import Shard, pieces


class ShardBuffers:
    """A rank's flat CPU buffers, one per server and direction: gradients to push and weights as pulled.

    of_server: the shards of every server, which a rank of another plan (a replay's single device) may use too.
    """

    def __init__(self, of_server: Sequence[Sequence[Shard]], training: Training):
        self._parameters = {parameter.name: parameter.tensor for parameter in training.parameters}
        own = [pieces(training.plan, training.mesh.rank, shards) for shards in of_server]
        dtype = getattr(torch, training.plan.precision.stored)
        self._pushed, self._pulled = ([piece for both in own for piece in both[i]] for i in range(2))
        self.pushes, self.pulls = (
            [torch.zeros(sum(piece.numel for piece in both[i]), dtype=dtype) for both in own] for i in range(2)
        )
        self._push_views, self._pull_views = (
            [v for flat, both in zip(flats, own) for v in flat_views(flat, (piece.shape for piece in both[i]))]
            for i, flats in enumerate((self.pushes, self.pulls))
        )
        self._weights = [self._parameters[piece.parameter.name].detach()[piece.in_part] for piece in self._pulled]

    def pack(self) -> None:
        """Copy the gradients into `pushes`."""
        gradients = {name: tensor.grad for name, tensor in self._parameters.items() if tensor.grad is not None}
        torch_private.copy_all(
            self._push_views, [gradients[piece.parameter.name][piece.in_part] for piece in self._pushed]
        )

    def unpack(self) -> None:
        """Copy `pulls` into the weights."""
        torch_private.copy_all(self._weights, self._pull_views)


def by_name(of_server: Sequence[Sequence[Shard]], flats: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return the servers' flat tensors as logical tensors."""
    shards = [shard for own in of_server for shard in own]
    values = {shard.name: flats[0].new_empty(shard.parameter.shape) for shard in shards}
    views = [v for flat, own in zip(flats, of_server) for v in flat_views(flat, (shard.shape for shard in own))]
    for shard, view in zip(shards, views):
        rows = slice(shard.start, shard.stop) if shard.shape else ...
        values[shard.name][rows] = view
    return values


class ServerClient:
    """A rank's connections to all servers: pushes go to every server at once, pulls fill the module's weights.

    versions: of each server's weights, as last pulled.
    """

    def __init__(self, training: Training):
        plan, frozen = training.plan, {parameter.name: parameter.tensor.detach() for parameter in training.data.frozen}
        self._of_server = sharding(plan).of_server
        self.buffers = ShardBuffers(self._of_server, training)
        pushed, pulled = pieces(plan, training.mesh.rank, frozen_shards(plan))
        self._frozen_pushed = [frozen[piece.parameter.name][piece.in_part] for piece in pushed]
        self._frozen = [frozen[piece.parameter.name][piece.in_part] for piece in pulled]
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
        """Give the first server this rank's frozen parameters (running statistics), to be saved."""
        if self._frozen_pushed:
            flat = flatten(self._frozen_pushed).to("cpu", self.buffers.pulls[0].dtype)
            self._exchange(self._channels[:1], [WorkerRequest(Ask.KEEP_FROZEN)], pushes=[flat])

    def read_gradient(self, version: int) -> dict[str, Tensor]:
        """Return the gradient of the servers' update number `version`, all of it, by name (verify)."""
        numels = [sum(shard.numel for shard in own) for own in self._of_server]
        flats = [torch.empty(numel, dtype=self.buffers.pulls[0].dtype) for numel in numels]
        self._exchange(self._channels, [WorkerRequest(Ask.READ_GRADIENT, version)] * len(flats), pulls=flats)
        return by_name(self._of_server, flats)

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
            if pushes and pushes[number].numel():
                channel.send(pushes[number], PUSH)
        replies = []
        for number, channel in enumerate(channels):
            replies.append(channel.receive_header(ServerReply))
            if pulls and pulls[number].numel():
                channel.receive(pulls[number], PULL)
        for channel in channels:
            channel.flush()
        return replies
