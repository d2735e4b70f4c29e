"""The one small exchange of every step: what all ranks must agree on before the weights change."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from parallelrun import comm
from parallelrun.mesh.runtime import WORLD, Mesh
from parallelrun.plan.structure import CONTROL_ELEMENTS


@dataclass(frozen=True)
class Totals:
    """Sums over the world: of the unscaled loss, its valid targets, the squared gradient norm, and stop requests."""

    loss_sum: float
    num_valid: float
    norm_squared: float
    stop_requests: float

    @property
    def loss(self) -> float:
        """Mean loss over valid targets."""
        return self.loss_sum / self.num_valid if self.num_valid else float("nan")


def agree(
    loss_sum: Tensor | float, num_valid: Tensor | int, norm_squared: Tensor | float, stop: bool, mesh: Mesh
) -> Totals:
    """Sum each rank's contribution over the world: one all-reduce of CONTROL_ELEMENTS fp64 numbers, alike on all ranks.

    Each quantity must be contributed once: the loss by one tensor coordinate of each replica's last stage, every
    logical gradient element by its owner.
    """
    values = (loss_sum, num_valid, norm_squared, float(stop))
    assert len(values) == CONTROL_ELEMENTS
    known = [0.0 if isinstance(value, Tensor) else value for value in values]
    vector = torch.tensor(known, dtype=torch.float64, device=mesh.device)
    for place, value in enumerate(values):
        if isinstance(value, Tensor):
            vector[place] = value
    comm.all_reduce(vector, mesh.group(WORLD), "control")
    return Totals(*vector.tolist())
