"""The groups that rows go over, and the order of experts in which a rank packs its rows for them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from parallelrun.mesh import Group, Mesh
from parallelrun.plan.structure import Plan

from .axes import AXIS, legs


@dataclass(frozen=True)
class Levels:
    """groups: of each leg in turn: (ep,), or (ep_inner, ep_outer). num_local: experts of a rank."""

    groups: tuple[Group, ...]
    num_local: int

    @property
    def num_ranks(self) -> int:
        """Of the expert axis."""
        return self.shape[0] * self.shape[1]

    @property
    def shape(self) -> tuple[int, int]:
        """(inner, outer) sizes; (ep, 1) where there is one level."""
        return self.groups[0].size, self.groups[1].size if len(self.groups) > 1 else 1

    def places(self, device: torch.device) -> Tensor:
        """int64 (experts,): where each expert's rows lie among what a rank sends: by the inner place of their
        destination, then its outer place, then the expert. With one level experts are in their own order."""
        inner, outer = self.shape
        order = torch.arange(inner * outer * self.num_local, device=device)
        return order.view(inner, outer, self.num_local).transpose(0, 1).reshape(-1)


def levels_of(plan: Plan, mesh: Mesh) -> Levels:
    """Those of this rank."""
    return Levels(tuple(mesh.group(axis) for axis in legs(plan)), plan.spec.experts // plan.mesh.size(AXIS))
