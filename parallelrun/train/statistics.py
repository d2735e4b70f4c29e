"""Running statistics of BatchNorm: frozen parameters that move once a step, alike under every plan.

A step moves them by `momentum` towards the mean over all sets of the global batch, of means and of unbiased variances.
What is frozen is saved, loaded and compared like any parameter, and never part of a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parallelrun import comm
from parallelrun.mesh import Mesh
from parallelrun.models.network import Network
from parallelrun.models.vision.batch_norm import PURPOSE, BatchNorm
from parallelrun.plan.parameters import LocalParameter
from parallelrun.plan.structure import Plan


@dataclass(frozen=True)
class _Kept:
    """One BatchNorm and where this rank holds its running mean and variance: (tensor, its range of channels) each."""

    layer: BatchNorm
    places: tuple[tuple[Tensor, slice], ...]


class RunningStatistics:
    """Those of one rank's stages.

    Where replicas go through every step together, they hold the same after each. Independent ones follow their own
    samples, and `share` makes them alike: as every step is linear, the result is that of an exchange in every step.
    """

    def __init__(self, parts: Sequence[Network], frozen: Sequence[LocalParameter], plan: Plan, mesh: Mesh):
        held = {parameter.name: parameter for parameter in frozen}
        self._kept = [
            _Kept(module, tuple(held_range(held[f"{name}.{kind}"], mesh) for kind in ("running_mean", "running_var")))
            for part in parts
            for name, module in part.named_modules()
            if isinstance(module, BatchNorm)
        ]
        sets = plan.sample_sets
        self._sums_in_step = sets is not None and sets.exchanged and not sets.spread
        self._apart = sets is not None and not sets.exchanged
        self._group = mesh.group("dp")

    @torch.no_grad()
    def finish_step(self, applied: bool) -> None:
        """Move the running statistics by what the step's forward passes saw; forget that if the step was not applied.

        Collective over dp where replicas have sets of their own.
        """
        seen = [kept.layer.take_statistics() for kept in self._kept]
        if not applied or not seen:
            return
        flat = torch.cat([one.flatten() for one in seen if one is not None])
        if self._sums_in_step:
            comm.all_reduce(flat, self._group, PURPOSE)
            flat /= self._group.size
        for kept, new in zip(self._kept, flat.split([2 * kept.layer.weight.numel() for kept in self._kept])):
            for (tensor, channels), values in zip(kept.places, new.view(2, -1)):
                tensor.lerp_(values[channels].to(tensor.dtype), kept.layer.momentum)

    @torch.no_grad()
    def share(self) -> None:
        """Average independent replicas' running statistics over dp, in place; nothing where they are alike anyway."""
        if not self._apart or self._group.size == 1 or not self._kept:
            return
        tensors = [tensor for kept in self._kept for tensor, _ in kept.places]
        flat = torch.cat([tensor.double() for tensor in tensors])
        comm.all_reduce(flat, self._group, PURPOSE)
        for tensor, values in zip(tensors, (flat / self._group.size).split([t.numel() for t in tensors])):
            tensor.copy_(values)


def held_range(parameter: LocalParameter, mesh: Mesh) -> tuple[Tensor, slice]:
    """(what this rank holds of a vector, which part of it that is)."""
    (channels,) = parameter.layout.ranges(parameter.spec.shape, mesh.shape.sizes, mesh.coordinate)
    return parameter.tensor, slice(*channels)
