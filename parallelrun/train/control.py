"""The one small exchange of every step: what all ranks must agree on before the weights change."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import Work

from parallelrun import comm
from parallelrun.mesh import Mesh
from parallelrun.plan.structure import CONTROL_ELEMENTS, WORLD


@dataclass(frozen=True)
class Totals:
    """Sums over the world: of the unscaled loss, its valid targets, stop requests, and the squared gradient norm of the
    batch, or of each independent replica."""

    loss_sum: float
    num_valid: float
    stop_requests: float
    norms_squared: tuple[float, ...]

    @property
    def loss(self) -> float:
        """Mean loss over valid targets."""
        return self.loss_sum / self.num_valid if self.num_valid else float("nan")

    @property
    def norm_squared(self) -> float:
        """Of the batch's gradient, or the mean over independent replicas: not finite if one of them is not."""
        return sum(self.norms_squared) / len(self.norms_squared)


class Agreement:
    """The exchange under way: `totals()` waits for it."""

    def __init__(self, vector: Tensor, work: Work | None):
        self._vector, self._work = vector, work

    def totals(self, norm_squared: Tensor | None = None) -> Totals:
        """What all ranks agree on. norm_squared: where it was not exchanged, because every rank has measured it."""
        if self._work is not None:
            with comm.label(WORLD, "control"):
                self._work.wait()
        loss, valid, stops, *squares = self._vector.tolist()
        return Totals(loss, valid, stops, tuple(squares) if norm_squared is None else (float(norm_squared),))


def agree(
    loss_sum: Tensor | float,
    num_valid: Tensor | int,
    norm_squared: Tensor | float,
    stop: bool,
    mesh: Mesh,
    num_norms: int = 1,
) -> Agreement:
    """Sum each rank's contribution over the world: one all-reduce of a few fp64 numbers, alike on all ranks.

    Each quantity must be contributed once: the loss by one tensor coordinate of each replica's last stage, every
    logical gradient element by its owner. num_norms: 1, or dp where every data replica has a norm of its own.
    """
    norms: list[Tensor | float] = [0.0] * num_norms
    norms[mesh.coordinate.get("dp", 0) if num_norms > 1 else 0] = norm_squared
    values = (loss_sum, num_valid, float(stop), *norms)
    assert len(values) == CONTROL_ELEMENTS + num_norms
    known = [0.0 if isinstance(value, Tensor) else value for value in values]
    vector = torch.tensor(known, dtype=torch.float64, device=mesh.device)
    for place, value in enumerate(values):
        if isinstance(value, Tensor):
            vector[place] = value
    return Agreement(vector, comm.all_reduce(vector, mesh.group(WORLD), "control", async_op=True))
