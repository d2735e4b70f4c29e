"""All servers as one, seen from a worker: pushes go to every server at once, pulls fill the module's weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from parallelrun import torch_private
from parallelrun.plan.structure import Plan
from parallelrun.train.parameters import LocalParameter

from .channel import Channel
from .protocol import END, KEEP, LEAVE, PULL, PUSH, READ, READ_FROZEN, READ_GRADIENT, SAVE, UPDATE, Reply, Request
from .shards import Shard, of_server


class Links:
    """A worker's channels to the servers, with one flat push and one flat pull buffer for each, in CPU memory.

    versions: of each server's weights, as last pulled.
    """

    def __init__(self, plan: Plan, parameters: Sequence[LocalParameter], frozen: Sequence[LocalParameter]):
        stored, reduce = getattr(torch, plan.precision.stored), getattr(torch, plan.precision.reduce)
        self._tensors = {parameter.name: parameter.tensor for parameter in parameters}
        self._frozen = [parameter.tensor.detach() for parameter in frozen]
        self._shards = [of_server(plan, server) for server in range(plan.servers)]
        self._channels = [Channel(plan.num_workers + server) for server in range(plan.servers)]
        numels = [sum(self._rows(shard).numel() for shard in shards) for shards in self._shards]
        self.pushes = [torch.zeros(numel, dtype=reduce) for numel in numels]
        self._pulls = [torch.zeros(numel, dtype=stored) for numel in numels]
        self._push_views = [view for views in map(self._views, self._shards, self.pushes) for view in views]
        self._pull_views = [view for views in map(self._views, self._shards, self._pulls) for view in views]
        self._weights = [self._rows(shard) for shards in self._shards for shard in shards]
        self.versions = [0] * plan.servers
        self.torn_reads = 0

    def pack(self) -> None:
        """Copy the gradients into the push buffers."""
        rows = [self._rows(shard, gradient=True) for shards in self._shards for shard in shards]
        torch_private.copy_all(self._push_views, rows)

    def read(self) -> Reply:
        """Pull the weights as they are. The first server's answer."""
        return self._ask([Request(READ)] * len(self._channels), [], pulls=True)[0]

    def update(self, request: Request) -> list[Reply]:
        """Push the packed gradient and pull the weights, when the servers give them. Their answers."""
        requests = [request._replace(operation=UPDATE, pulled=version) for version in self.versions]
        return self._ask(requests, self.pushes, pulls=True)

    def meet(self, operation: int, request: Request, waiting: Callable[[], None]) -> bool:
        """Come to a meeting (SAVE or END) and stay until it has taken place; False if it has failed.

        waiting: called about once a second meanwhile.
        """
        assert operation in (SAVE, END)
        asked, ok = list(self._channels), True
        while asked:
            for channel in asked:
                channel.send_header(request._replace(operation=operation))
            replies = [(channel, channel.receive_reply()) for channel in asked]
            for channel in asked:
                channel.flush()
            ok = ok and all(reply.ready >= 0 for _, reply in replies)
            asked = [channel for channel, reply in replies if not reply.ready]
            waiting()
        return ok

    def read_frozen(self) -> None:
        """Take over the first server's values of what nobody updates."""
        if self._frozen:
            flat = self._exchange_with_first(Request(READ_FROZEN))
            for tensor, part in zip(self._frozen, flat.split([tensor.numel() for tensor in self._frozen])):
                tensor.copy_(part.view_as(tensor))

    def keep_frozen(self) -> None:
        """Give the first server this worker's values of what nobody updates (running statistics), to be saved."""
        if self._frozen:
            flat = torch.cat([tensor.flatten() for tensor in self._frozen]).to("cpu", self._pulls[0].dtype)
            channel = self._channels[0]
            channel.send_header(Request(KEEP))
            channel.send(flat, PUSH)
            channel.receive_reply()
            channel.flush()

    def read_gradient(self, clock: int) -> dict[str, Tensor]:
        """The gradient that the servers' update of step `clock` was made of, by name (verify)."""
        found = {name: torch.zeros_like(tensor, device="cpu") for name, tensor in self._tensors.items()}
        for shards, channel, pull in zip(self._shards, self._channels, self._pulls):
            channel.send_header(Request(READ_GRADIENT, clock))
            channel.receive_reply()
            flat = channel.receive(torch.empty_like(pull), PULL)
            channel.flush()
            for shard, view in zip(shards, self._views(shards, flat)):
                _rows_of(found[shard.name], shard).copy_(view)
        return found

    def leave(self) -> None:
        """Say goodbye: the servers' threads for this worker end."""
        for channel in self._channels:
            channel.send_header(Request(LEAVE))
        for channel in self._channels:
            channel.flush()

    def _ask(self, requests: list[Request], payloads: list[Tensor], pulls: bool) -> list[Reply]:
        for number, (channel, request) in enumerate(zip(self._channels, requests)):
            channel.send_header(request)
            if payloads:
                channel.send(payloads[number], PUSH)
        replies = []
        for channel, pull in zip(self._channels, self._pulls):
            replies.append(channel.receive_reply())
            if pulls:
                channel.receive(pull, PULL)
        for channel in self._channels:
            channel.flush()
        self.versions = [reply.version for reply in replies]
        self.torn_reads += len(set(self.versions)) > 1
        torch_private.copy_all(self._weights, self._pull_views)
        return replies

    def _exchange_with_first(self, request: Request) -> Tensor:
        channel = self._channels[0]
        channel.send_header(request)
        channel.receive_reply()
        numel = sum(tensor.numel() for tensor in self._frozen)
        flat = channel.receive(torch.empty(numel, dtype=self._pulls[0].dtype), PULL)
        channel.flush()
        return flat

    def _rows(self, shard: Shard, gradient: bool = False) -> Tensor:
        tensor = self._tensors[shard.name]
        whole = tensor.grad if gradient else tensor.detach()
        assert whole is not None, f"backward left no gradient for {shard.name}"
        return _rows_of(whole, shard)

    def _views(self, shards: Sequence[Shard], flat: Tensor) -> list[Tensor]:
        rows = [self._rows(shard) for shard in shards]
        parts = flat.split([row.numel() for row in rows])
        return [part.view(row.shape) for part, row in zip(parts, rows)]


def _rows_of(tensor: Tensor, shard: Shard) -> Tensor:
    return tensor[shard.start : shard.stop] if tensor.dim() else tensor
