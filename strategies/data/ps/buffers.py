"""One flat buffer per server each way: gradients packed to be pushed, pulled weights unpacked into the module."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from parallelrun import torch_private
from parallelrun.plan.parameters import LocalParameter
from parallelrun.plan.structure import Plan

from .shards import Shard, of_server


class Buffers:
    """pushes: gradients in the reduce dtype; pulls: weights in the stored dtype; in CPU memory, a server each."""

    def __init__(self, plan: Plan, parameters: Sequence[LocalParameter]):
        stored, reduce = getattr(torch, plan.precision.stored), getattr(torch, plan.precision.reduce)
        self._tensors = {parameter.name: parameter.tensor for parameter in parameters}
        self._shards = [of_server(plan, server) for server in range(plan.servers)]
        numels = [sum(self._rows(shard).numel() for shard in shards) for shards in self._shards]
        self.pushes = [torch.zeros(numel, dtype=reduce) for numel in numels]
        self.pulls = [torch.zeros(numel, dtype=stored) for numel in numels]
        self._push_views = self._views(self.pushes)
        self._pull_views = self._views(self.pulls)
        self._weights = [self._rows(shard) for shards in self._shards for shard in shards]

    def pack(self) -> None:
        """Copy the gradients into `pushes`."""
        rows = [self._rows(shard, gradient=True) for shards in self._shards for shard in shards]
        torch_private.copy_all(self._push_views, rows)

    def unpack(self) -> None:
        """Copy `pulls` into the weights."""
        torch_private.copy_all(self._weights, self._pull_views)

    def named(self, flats: Sequence[Tensor]) -> dict[str, Tensor]:
        """Buffers like `pulls`, as whole tensors by name, on the CPU."""
        found = {name: torch.empty_like(value, device="cpu").detach() for name, value in self._tensors.items()}
        shards = [shard for of_one in self._shards for shard in of_one]
        for shard, view in zip(shards, self._views(flats)):
            _rows_of(found[shard.name], shard).copy_(view)
        return found

    def _views(self, flats: Sequence[Tensor]) -> list[Tensor]:
        views = []
        for shards, flat in zip(self._shards, flats):
            rows = [self._rows(shard) for shard in shards]
            parts = flat.split([row.numel() for row in rows])
            views += [part.view(row.shape) for part, row in zip(parts, rows)]
        return views

    def _rows(self, shard: Shard, gradient: bool = False) -> Tensor:
        tensor = self._tensors[shard.name]
        whole = tensor.grad if gradient else tensor.detach()
        assert whole is not None, f"backward left no gradient for {shard.name}"
        return _rows_of(whole, shard)


def _rows_of(tensor: Tensor, shard: Shard) -> Tensor:
    return tensor[shard.start : shard.stop] if tensor.dim() else tensor
