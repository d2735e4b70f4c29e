"""Compares tensors that are the same on several ranks: replicated over mesh dims that do not shard it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from parallelrun.distributed import comm
from parallelrun.distributed.mesh import Group
from parallelrun.planner.facts.corruption_cost import replicated_over
from parallelrun.training.corruption.digests import digests
from parallelrun.training.corruption.state import stored_weights
from parallelrun.training.loop.build import Training


class Replicas:
    """The digests of this rank's replicated tensors: weights, optimizer state, and the gradients of the last step."""

    def __init__(self, training: Training):
        self._training = training
        weights = [(f"{p.name} weight", p.tensor.detach(), p.layout) for p in training.held]
        layouts = {p.name: p.layout for p in training.held}
        stored = [p for name, p in stored_weights(training).items() if p.layout != layouts[name]]
        self._weights = [*weights, *((f"{p.name} stored weight", p.tensor, p.layout) for p in stored)]
        self._dims = {layout: replicated_over(layout, training.plan) for _, _, layout in self._weights}

    @torch.no_grad()
    def differing(self) -> dict[str, tuple[str, int]]:
        """Return (its replicas, this rank's digest) of each tensor that is not the same on its ranks, by name.

        One all-reduce of 16 bytes a tensor over each mesh dim. All ranks of a set of replicas return the same names.
        """
        mesh = self._training.mesh
        odd: dict[str, tuple[str, int]] = {}
        for dims, tensors in sorted(self._by_dims().items()):
            own = digests([*tensors.values()])
            fixed = [name for name in mesh.shape.mesh_dim_names if name not in dims]
            key = " ".join(f"{name}={mesh.coordinate[name]}" for name in fixed)
            rows = zip(tensors, own.tolist(), _differ(own, [mesh.group(dim) for dim in dims]))
            odd |= {name: (key, value) for name, value, is_wrong in rows if is_wrong}
        return odd

    def _by_dims(self) -> dict[tuple[str, ...], dict[str, Tensor]]:
        """The tensors by the mesh dims over which they are replicated, in the same order on all ranks of a set."""
        training = self._training
        by_dims: dict[tuple[str, ...], dict[str, Tensor]] = {}
        rows = [(name, tensor, self._dims[layout]) for name, tensor, layout in self._weights]
        for p in training.parameters:
            tensors = dict(sorted(training.optimizer.state(p.name).items()))
            if p.tensor.grad is not None:
                tensors["gradient"] = p.tensor.grad
            rows += [(f"{p.name} {kind}", tensor, self._dims[p.layout]) for kind, tensor in tensors.items()]
        for name, tensor, dims in rows:
            if dims:
                by_dims.setdefault(dims, {})[name] = tensor
        return by_dims


def _differ(own: Tensor, groups: Sequence[Group]) -> list[bool]:
    """Return which digests of `own` (int64, 1-d) are not the same on all ranks of the groups together. Collective."""
    largest = torch.stack((own, ~own))  # the largest complement is that of the smallest
    for group in groups:
        comm.all_reduce(largest, group, "control", op="max")
    differs: list[bool] = (largest[0] != ~largest[1]).tolist()
    return differs
