"""BatchNorm (Ioffe and Szegedy 2015) over sets of samples that do not depend on the plan.

A set is `size` consecutive samples of the global batch. A rank that has complete sets normalises each by itself (ghost
batch normalisation, Hoffer et al. 2017); data replicas that share a set exchange its sums in forward and in backward.
Either way the numbers are those of one device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from parallelrun.distributed import comm
from parallelrun.distributed.mesh import Mesh
from parallelrun.models import dropout
from parallelrun.models.functions import accurate_dtype
from parallelrun.models.layers import RoleLayer
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.model.model_spec import SAMPLE_SET_ROLE

PURPOSE = "statistics"


@dataclass(frozen=True)
class SetPiece:
    """Samples [start, stop) of a microbatch that belong to set number `index` of the global batch."""

    index: int
    start: int
    stop: int


class SampleSetLayout:
    """The sets of this rank's samples. size: samples of a set, into which each microbatch is cut.

    spread: sets have samples of other data replicas too; then there is one microbatch, and `pieces` are its parts by
    set.
    """

    def __init__(self, plan: Plan, mesh: Mesh):
        assert plan.sample_sets is not None, "a plan of a model without BatchNorm has no sets"
        self.size, self.spread = plan.sample_sets.size, plan.sample_sets.spread
        self.group = mesh.group("dp")
        self.num_sets = plan.batch.global_batch // self.size
        first = self.group.index * plan.batch.replica_batch
        self.pieces = _pieces(first, first + plan.batch.replica_batch, self.size)


def _pieces(first: int, stop: int, size: int) -> tuple[SetPiece, ...]:
    """The samples [first, stop) of the global batch by set."""
    return tuple(
        SetPiece(index, max(first, index * size) - first, min(stop, (index + 1) * size) - first)
        for index in range(first // size, -(-stop // size))
    )


class BatchNorm(RoleLayer):
    """x (batch, channels, ...) normalised per channel, in at least fp32. Parameters `weight`, `bias` and, frozen,
    `running_mean`, `running_var`, which evaluation uses and `training.loop.batchnorm_statistics` updates.

    momentum: the share of a step's statistics in the running ones. sets: see `give_sets`; None: each microbatch is one
    set.
    """

    layer_role = SAMPLE_SET_ROLE
    uncompiled: ClassVar[tuple[str, ...]] = ("forward",)

    def __init__(self, channels: int, eps: float, momentum: float, compute_dtype: torch.dtype):
        super().__init__(compute_dtype)
        self.eps, self.momentum = eps, momentum
        self.weight = nn.Parameter(torch.empty(channels))
        self.bias = nn.Parameter(torch.empty(channels))
        self.running_mean = nn.Parameter(torch.empty(channels), requires_grad=False)
        self.running_var = nn.Parameter(torch.empty(channels), requires_grad=False)
        self.sets: SampleSetLayout | None = None
        self._seen: dict[int, list[Tensor]] = {}  # by microbatch: recomputation overwrites its own

    def forward(self, x: Tensor) -> Tensor:
        compute = self.compute_dtype
        wide = x.to(accurate_dtype(compute))
        weight, bias = (p.to(compute).to(wide.dtype) for p in (self.weight, self.bias))
        if not self.training:
            mean, var = self.running_mean.to(wide.dtype), self.running_var.to(wide.dtype)
            return functional.batch_norm(wide, mean, var, weight, bias, False, 0.0, self.eps).to(compute)
        if self.sets is None or not self.sets.spread:
            out, statistics = self._complete_sets(wide, weight, bias)
        else:
            normalise: Any = _NormaliseSpreadSets.apply
            out, seen = normalise(wide, weight, bias, self.eps, self.sets)
            statistics = list(seen.unbind())
        ids = dropout.current_sample_ids()
        self._seen[0 if ids is None else ids.data_ptr()] = statistics
        return out.to(compute)

    def _complete_sets(self, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, list[Tensor]]:
        """(x normalised set by set, the sets' statistics)."""
        out, statistics = [], []
        for part in x.split(self.sets.size) if self.sets is not None else (x,):
            mean, var = x.new_zeros(2, x.size(1)).unbind()
            # with momentum 1, torch's kernel returns this set's statistics as the "running" ones
            out.append(functional.batch_norm(part, mean, var, weight, bias, True, 1.0, self.eps))
            statistics.append(torch.stack((mean, var)))
        return (out[0] if len(out) == 1 else torch.cat(out)), statistics

    def take_statistics(self) -> Tensor | None:
        """fp64 (2, channels): mean and unbiased variance, averaged over the sets since the last call (this rank's own,
        or all of them if sets are spread); None if there were none."""
        seen = [statistic.double() for statistics in self._seen.values() for statistic in statistics]
        self._seen.clear()
        return torch.stack(seen).mean(0) if seen else None


class _NormaliseSpreadSets(torch.autograd.Function):
    """Normalises sets that several data replicas share, with one exchange in forward and one in backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, sets: SampleSetLayout
    ) -> tuple[Tensor, Tensor]:
        """x (batch, channels, ...) -> (the same normalised, fp64 (sets, 2, channels): mean and unbiased variance)."""
        area = x[0, 0].numel()
        table = x.new_zeros((sets.num_sets, 2, x.size(1)), dtype=torch.float64)
        for piece in sets.pieces:
            part = x[piece.start : piece.stop]
            var, mean = torch.var_mean(part, dim=_all_but_channels(x), correction=0)
            count = (piece.stop - piece.start) * area
            # second moments are accurate enough here: the sums are in fp64, and var is already central
            table[piece.index] = count * torch.stack((mean.double(), var.double() + mean.double().square()))
        comm.all_reduce(table, sets.group, PURPOSE)
        table /= sets.size * area
        mean, var = table[:, 0], (table[:, 1] - table[:, 0].square()).clamp_(min=0)
        ctx.save_for_backward(x, weight, mean.to(x.dtype), (var + eps).rsqrt().to(x.dtype))
        ctx.sets = sets
        ctx.sums = None  # zero bubble runs backward for x, then for the weights with the same gradient: exchanged once
        parts = [
            functional.batch_norm(
                x[p.start : p.stop], mean[p.index].to(x.dtype), var[p.index].to(x.dtype), weight, bias, False, 0.0, eps
            )
            for p in sets.pieces
        ]
        unbiased = var * (sets.size * area / max(sets.size * area - 1, 1))
        statistics = torch.stack((mean, unbiased), dim=1)
        ctx.mark_non_differentiable(statistics)
        return torch.cat(parts), statistics

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor, Tensor, Tensor, None, None]:
        x, weight, mean, scale = ctx.saved_tensors
        sets, dims, area = ctx.sets, _all_but_channels(x), x[0, 0].numel()
        sums = x.new_zeros((sets.num_sets, 2, x.size(1)))
        for p in sets.pieces:
            part = gradient[p.start : p.stop]
            of_scale = (x[p.start : p.stop] - _per_channel(mean[p.index], x)).mul_(part).sum(dims) * scale[p.index]
            sums[p.index] = torch.stack((part.sum(dims), of_scale))
        for_weight, for_bias = sums[:, 1].sum(0), sums[:, 0].sum(0)  # this replica's: the data strategy sums them
        if ctx.sums is None:
            comm.all_reduce(sums, sets.group, PURPOSE)
            ctx.sums = sums.div_(sets.size * area)
        sums = ctx.sums
        out = torch.empty_like(x)
        for p in sets.pieces:  # in place: these tensors are as large as what forward keeps
            part = torch.sub(x[p.start : p.stop], _per_channel(mean[p.index], x), out=out[p.start : p.stop])
            part.mul_(_per_channel(scale[p.index], x)).mul_(_per_channel(sums[p.index, 1], x))
            part.add_(_per_channel(sums[p.index, 0], x))
            torch.sub(gradient[p.start : p.stop], part, out=part)
            part.mul_(_per_channel(weight * scale[p.index], x))
        return out, for_weight, for_bias, None, None


def _all_but_channels(x: Tensor) -> tuple[int, ...]:
    return (0, *range(2, x.dim()))


def _per_channel(values: Tensor, like: Tensor) -> Tensor:
    """(channels,) reshaped to broadcast over `like` (batch, channels, ...)."""
    return values.view(1, -1, *(1,) * (like.dim() - 2))


def give_sets(network: nn.Module, plan: Plan, mesh: Mesh) -> None:
    """Give every BatchNorm of this rank's blocks the sets of the plan."""
    sets = SampleSetLayout(plan, mesh)
    for module in network.modules():
        if isinstance(module, BatchNorm):
            module.sets = sets
