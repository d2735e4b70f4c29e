"""Compares tensors that several ranks hold alike. Layouts say which: a tensor is replicated over the mesh dims that do
not shard it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from parallelrun.distributed import comm
from parallelrun.distributed.mesh import Group
from parallelrun.planner.contract.parameters import LocalParameter
from parallelrun.planner.facts.corruption_cost import replicated_over
from parallelrun.training.corruption.digests import combined, digest_of_all, digests
from parallelrun.training.corruption.state import stored_weights
from parallelrun.training.loop.build import Training


@dataclass(frozen=True)
class _Alike:
    """Tensors with the same replicas. key: names the set of ranks that hold them."""

    key: str
    groups: tuple[Group, ...]
    names: tuple[str, ...]
    tensors: tuple[Tensor, ...]

    def differs(self, own: Tensor) -> Tensor:
        """Return which digests of `own` (int64, 1-d) are not the same on all ranks of the set. Collective."""
        largest = torch.stack((own, ~own))  # the largest complement is that of the smallest
        for group in self.groups:
            comm.all_reduce(largest, group, "control", op="max")
        return largest[0] != ~largest[1]


class Replicas:
    """The digests of this rank's replicated tensors: weights, optimizer state, and the gradients of the last step."""

    def __init__(self, training: Training):
        self._training = training
        weights = [(f"{p.name} weight", p.tensor.detach(), p) for p in training.held]
        layouts = {p.name: p.layout for p in training.held}
        stored = [p for name, p in stored_weights(training).items() if p.layout != layouts[name]]
        self._weights = [*weights, *((f"{p.name} stored weight", p.tensor, p) for p in stored)]
        layouts_held = {p.layout for _, _, p in self._weights}
        self._dims = {layout: replicated_over(layout, training.plan) for layout in layouts_held}
        self._met: dict[str, Tensor] = {}

    def after_step(self, step: int) -> None:
        """Note one checksum of this rank's weights, if independent replicas have met in this step."""
        data = self._training.plan.data
        if data.independent and data.meets(step):
            met = digest_of_all([tensor for _, tensor, _ in self._weights])
            self._met = {f"the weights after replicas met in step {step}": met.view(1)}

    def restart(self) -> None:
        """Training returns to an earlier step."""
        self._met = {}

    @torch.no_grad()
    def differing(self) -> dict[str, tuple[str, int]]:
        """Return (its replicas, this rank's digest) of each tensor that is not alike on its ranks, by name.

        One all-reduce of 16 bytes over each mesh dim, and where ranks differ one of 16 bytes a tensor. All ranks of a
        set of replicas return the same names.
        """
        odd: dict[str, tuple[str, int]] = {}
        for alike in self._sets():
            own = digests(alike.tensors)
            if not bool(alike.differs(combined(own).view(1))):
                continue
            wrong, values = alike.differs(own).tolist(), own.tolist()
            odd |= {name: (alike.key, value) for name, value, is_wrong in zip(alike.names, values, wrong) if is_wrong}
        return odd

    def _sets(self) -> list[_Alike]:
        """The tensors by their replicas, in the same order on all ranks of a set."""
        by_dims: dict[tuple[str, ...], list[tuple[str, Tensor]]] = {}
        for name, tensor, parameter in self._tensors():
            by_dims.setdefault(self._dims[parameter.layout], []).append((name, tensor))
        training, mesh = self._training, self._training.mesh
        for kind, parameters in training.data.kept.items():
            for extra in parameters:
                dims = replicated_over(extra.layout, training.plan, alike=True)
                by_dims.setdefault(dims, []).append((f"{extra.name} {kind}", extra.tensor))
        for name, digest in self._met.items():
            by_dims.setdefault(mesh.shape.mesh_dims_of("dp"), []).append((name, digest))
        sets = []
        for dims, named in sorted(by_dims.items()):
            if dims:
                groups = tuple(mesh.group(dim) for dim in dims)
                fixed = [name for name in mesh.shape.mesh_dim_names if name not in dims]
                key = " ".join(f"{name}={mesh.coordinate[name]}" for name in fixed)
                sets.append(_Alike(key, groups, *zip(*named)))
        return sets

    def _tensors(self) -> list[tuple[str, Tensor, LocalParameter]]:
        training, tensors = self._training, list(self._weights)
        for parameter in training.parameters:
            state = training.optimizer.state(parameter.name)
            tensors += [(f"{parameter.name} {kind}", state[kind], parameter) for kind in sorted(state)]
            if parameter.tensor.grad is not None:
                tensors.append((f"{parameter.name} gradient", parameter.tensor.grad, parameter))
        return tensors
