"""Norms of rows whose features are split over one axis: one small collective forward, one backward.

LayerNorm gathers each part's mean and sum of squares about that mean and merges them exactly (Chan, Golub and LeVeque
1979). The difference E[x^2] - E[x]^2, which others take, loses every digit where the mean is large. RMSNorm has no
such difference: its sum of squares is summed.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from parallelrun.distributed import comm
from parallelrun.distributed.mesh import Group
from parallelrun.models import layers as single_device
from parallelrun.models.autograd import apply
from parallelrun.models.functions import accurate_dtype
from parallelrun.models.rounding import rounded

from .sharding import TakesOver

PURPOSE = "norm"


class _NormaliseSplit(torch.autograd.Function):
    """LayerNorm or RMSNorm without weights. Saved for backward: its own result, and one number per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, eps: float, centred: bool) -> Tensor:
        """x (..., features / size), equal parts, or a part of which several ranks have a copy, all equally many.
        Statistics in at least fp32, the result in the dtype of x. centred: LayerNorm, which subtracts the mean."""
        wide, count = x.to(accurate_dtype(x.dtype)), x.size(-1)
        if centred:
            variance, mean = torch.var_mean(wide, dim=-1, correction=0)
            mean, variance = _merge(torch.stack((mean, variance * count)), count, group)
            wide = wide - mean.unsqueeze(-1)
        else:
            squares = wide.square().sum(-1)
            comm.all_reduce(squares, group, PURPOSE)
            variance = squares / (count * group.size)
        rstd = torch.rsqrt(variance + eps).unsqueeze(-1)
        unit = (wide * rstd).to(x.dtype)
        ctx.save_for_backward(unit, rstd)
        ctx.group, ctx.centred = group, centred
        return unit

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        unit, rstd = ctx.saved_tensors
        wide, direction = grad.to(rstd.dtype), unit.to(rstd.dtype)
        means = torch.stack(([wide.sum(-1)] if ctx.centred else []) + [(wide * direction).sum(-1)])
        comm.all_reduce(means, ctx.group, PURPOSE)
        *mean, along = (means / (unit.size(-1) * ctx.group.size)).unsqueeze(-1)
        for offset in mean:
            wide = wide - offset
        return ((wide - direction * along) * rstd).to(grad.dtype), None, None, None


def _merge(own: Tensor, count: int, group: Group) -> tuple[Tensor, Tensor]:
    """own (2, ...): mean and sum of squares about it of this rank's `count` features. Returns those of all features:
    (mean, variance)."""
    means, squares = comm.all_gather(own.unsqueeze(0), group, PURPOSE).unbind(1)
    mean = means.mean(0)
    return mean, (squares.sum(0) + (means - mean).square().sum(0) * count) / (count * group.size)


class SplitNorm(TakesOver, single_device.HiddenNorm):
    """This rank's features of whole rows. Weights come after, as plain operations: split backward works on them."""

    communicates: ClassVar[bool] = True
    uncompiled: ClassVar[tuple[str, ...]] = ("forward",)
    group: Group

    def forward(self, x: Tensor) -> Tensor:
        unit = apply(_NormaliseSplit, x.to(self.compute_dtype), self.group, self.eps, self.kind != "rmsnorm")
        weight = rounded(self.weight, unit.dtype)
        return unit * weight if self.bias is None else torch.addcmul(rounded(self.bias, unit.dtype), unit, weight)
