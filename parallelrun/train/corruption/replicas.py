"""Compares tensors that several ranks hold alike. Layouts say which: a tensor is replicated over the mesh dims that do
not shard it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from parallelrun import comm
from parallelrun.mesh import Group
from parallelrun.plan.parameters import LocalParameter
from parallelrun.train.build import Training
from parallelrun.train.corruption.digests import digests
from parallelrun.train.corruption.state import stored_weights


@dataclass(frozen=True)
class _Alike:
    """Tensors with the same replicas. key: names the set of ranks that hold them."""

    key: str
    groups: tuple[Group, ...]
    names: tuple[str, ...]
    tensors: tuple[Tensor, ...]


class Replicas:
    """The digests of this rank's replicated tensors: weights, optimizer state, and the gradients of the last step."""

    def __init__(self, training: Training):
        self._training = training

    @torch.no_grad()
    def differing(self) -> dict[str, tuple[str, int]]:
        """Return (its replicas, this rank's digest) of each tensor that is not alike on its ranks, by name.

        One all-reduce of 16 bytes a tensor over each mesh dim. All ranks of a set of replicas return the same names.
        """
        found: dict[str, tuple[str, int]] = {}
        for alike in self._sets():
            own = digests(alike.tensors)
            largest = torch.stack((own, ~own))  # the largest complement is that of the smallest
            for group in alike.groups:
                comm.all_reduce(largest, group, "control", op="max")
            differs = (largest[0] != ~largest[1]).tolist()
            values = own.tolist()
            found |= {name: (alike.key, value) for name, value, wrong in zip(alike.names, values, differs) if wrong}
        return found

    def _sets(self) -> list[_Alike]:
        """The tensors by their replicas, in the same order on all ranks of a set."""
        by_dims: dict[tuple[str, ...], list[tuple[str, Tensor]]] = {}
        for name, tensor, parameter in self._tensors():
            by_dims.setdefault(self._replicated_over(parameter), []).append((name, tensor))
        mesh, sets = self._training.mesh, []
        for dims, named in sorted(by_dims.items()):
            if dims:
                groups = tuple(mesh.group(dim) for dim in dims)
                fixed = [name for name in mesh.shape.mesh_dim_names if name not in dims]
                key = " ".join(f"{name}={mesh.coordinate[name]}" for name in fixed)
                sets.append(_Alike(key, groups, *zip(*named)))
        return sets

    def _tensors(self) -> list[tuple[str, Tensor, LocalParameter]]:
        training = self._training
        found = []
        for parameter in training.held:
            found.append((f"{parameter.name} weight", parameter.tensor.detach(), parameter))
        for parameter in training.parameters:
            state = training.optimizer.state(parameter.name)
            found += [(f"{parameter.name} {kind}", state[kind], parameter) for kind in sorted(state)]
            if parameter.tensor.grad is not None:
                found.append((f"{parameter.name} gradient", parameter.tensor.grad, parameter))
        for parameter in stored_weights(training).values():
            found.append((f"{parameter.name} stored weight", parameter.tensor, parameter))
        return found

    def _replicated_over(self, parameter: LocalParameter) -> tuple[str, ...]:
        """The mesh dims of several ranks on which all have the same part, but for stages and independent replicas."""
        plan = self._training.plan
        shape = plan.mesh
        differ = {dim for axis in (*parameter.layout.axes, "pp") for dim in shape.mesh_dims_of(axis)}
        if plan.data.independent:
            differ |= set(shape.mesh_dims_of("dp"))
        return tuple(dim for dim in shape.mesh_dim_names if dim not in differ and shape.size(dim) > 1)
