"""Cross-entropy over logits whose vocabulary is split: three numbers per target are exchanged, never the logits.

Source: Shoeybi et al. 2019, section 3; the smoothing term here sums over the whole vocabulary, not over a shard.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from parallelrun.distributed import comm
from parallelrun.distributed.mesh import Group
from parallelrun.models.autograd import apply
from parallelrun.models.layers import TokenLoss

from .sharding import WHOLE, EvenSlice

PURPOSE = "loss"


class _CrossEntropy(torch.autograd.Function):
    """Sum over targets >= 0 of logsumexp(x) - (1 - s) x[target] - s mean(x), with smoothing s, and of logsumexp(x)^2
    times z_loss.

    Kept for backward: the local logits as they came and one number per target; the gradient needs no collective.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, group: Group, start: int, vocab: int, smoothing: float, z_loss: float
    ) -> Tensor:
        """logits (n, local vocab), targets (n,) global ids; `start`: the global id of the first local column."""
        values = logits.to(torch.promote_types(logits.dtype, torch.float32))
        largest = values.amax(1) if values.size(1) else values.new_full(values.shape[:1], -torch.inf)
        comm.all_reduce(largest, group, PURPOSE, op="max")
        shifted = values - largest.unsqueeze(1)
        column, owned = _own_column(targets, start, values.size(1))
        sums = values.new_zeros(2, values.size(0))  # of exponentials; of logits, weighted by the target distribution
        if values.size(1):
            sums[1] = torch.where(owned, shifted.gather(1, column.unsqueeze(1)).squeeze(1), 0) * (1 - smoothing)
            if smoothing:
                sums[1] += shifted.sum(1) * (smoothing / vocab)
            sums[0] = shifted.exp_().sum(1)
        comm.all_reduce(sums, group, PURPOSE)
        log_sum = sums[0].log()
        complete = log_sum + largest
        ctx.save_for_backward(logits, targets, complete)
        ctx.start, ctx.vocab, ctx.smoothing, ctx.z_loss = start, vocab, smoothing, z_loss
        losses = log_sum - sums[1]
        return torch.where(targets >= 0, losses + z_loss * complete.square() if z_loss else losses, 0).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        logits, targets, log_sum = ctx.saved_tensors
        out = (logits.to(log_sum.dtype) - log_sum.unsqueeze(1)).exp_()
        column, owned = _own_column(targets, ctx.start, logits.size(1))
        if ctx.z_loss:
            out *= (1.0 + 2.0 * ctx.z_loss * log_sum).unsqueeze(1)
        if ctx.smoothing:
            out -= ctx.smoothing / ctx.vocab
        if logits.size(1):
            out.scatter_add_(1, column.unsqueeze(1), (owned.to(out.dtype) * (ctx.smoothing - 1)).unsqueeze(1))
        out *= (grad * (targets >= 0)).unsqueeze(1)
        return out.to(logits.dtype), None, None, None, None, None, None


def _own_column(targets: Tensor, start: int, num_columns: int) -> tuple[Tensor, Tensor]:
    """(column of each target in this shard, 0 where another rank has it; whether this rank has it)."""
    owned = (targets >= start) & (targets < start + num_columns)
    return torch.where(owned, targets - start, 0), owned


class VocabParallelLoss(nn.Module):
    """`TokenLoss` on this rank's logits: the sum over its samples, the same on every rank of the group, at least fp32.

    like: with its label smoothing and z-loss. group: of the axis that splits the vocabulary; start: the first token id
    here; rows: which samples these are.
    """

    def __init__(self, like: TokenLoss, group: Group, start: int, vocab: int, rows: EvenSlice = WHOLE):
        super().__init__()
        self.label_smoothing, self.z_loss = like.label_smoothing, like.z_loss
        self.group, self.start, self.vocab, self.rows = group, start, vocab, rows

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """logits (own samples, ..., local vocab); targets (all samples, ...) global ids, negative where ignored.
        Returns the sum, a scalar."""
        rows, wanted = logits.flatten(0, -2), self.rows.of(targets).flatten()
        z_loss = self.z_loss if self.training else 0.0
        return apply(_CrossEntropy, rows, wanted, self.group, self.start, self.vocab, self.label_smoothing, z_loss)

    def whole_logits(self, logits: Tensor) -> Tensor:
        """logits (..., local vocab) -> (..., vocab), the same on every rank of the group; for generation."""
        gathered = logits.new_zeros(*logits.shape[:-1], self.vocab)
        gathered[..., self.start : self.start + logits.size(-1)] = logits
        comm.all_reduce(gathered, self.group, PURPOSE)
        return gathered
