"""Cross-entropy over a split vocabulary: the value and the gradient of torch's own on the whole logits."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from parallelrun.base.layout import chunk_range
from parallelrun.distributed.mesh import Group
from parallelrun.models.layers import TokenLoss
from parallelrun.strategies.tensor.common.cross_entropy import VocabParallelLoss
from tests.pool import run_ranks

BOUND, Z_LOSS = 1e-10, 0.2  # fp64
SHAPE = (2, 5)  # samples x sequence


def logits_and_targets(vocab: int, scale: float, dtype: torch.dtype, ignored: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn((*SHAPE, vocab), generator=generator, dtype=torch.float64) * scale).to(dtype)
    targets = torch.randint(vocab, SHAPE, generator=generator)
    if ignored == "some":
        targets[0, ::2] = -1
    return logits, torch.full_like(targets, -1) if ignored == "all" else targets


def split_loss(vocab: int, smoothing: float, scale: float, dtype: torch.dtype, ignored: str) -> tuple[Tensor, Tensor]:
    """Body of a rank: (loss, gradient of 3 x loss by the local logits)."""
    rank, world = dist.get_rank(), dist.get_world_size()
    group = Group("tp", tuple(range(world)), rank, dist.group.WORLD)
    start, stop = chunk_range(vocab, world, rank)
    logits, targets = logits_and_targets(vocab, scale, dtype, ignored)
    local = logits[..., start:stop].clone().requires_grad_()
    loss = VocabParallelLoss(TokenLoss(smoothing, Z_LOSS), group, start, vocab)(local, targets)
    (3 * loss).backward()
    return loss.detach(), local.grad


def whole_loss(vocab: int, smoothing: float, scale: float, dtype: torch.dtype, ignored: str) -> tuple[Tensor, Tensor]:
    logits, targets = logits_and_targets(vocab, scale, dtype, ignored)
    wide = logits.double().requires_grad_()
    loss = functional.cross_entropy(
        wide.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum", label_smoothing=smoothing
    )
    loss = loss + Z_LOSS * wide.logsumexp(-1).square()[targets >= 0].sum()
    (3 * loss).backward()
    return loss.detach(), wide.grad


def test_large_logits_neither_overflow_nor_lose_the_target():
    case = (7, 0.0, 1e4, torch.float64, "some")
    results, (expected, gradient) = run_ranks(2, split_loss, *case), whole_loss(*case)
    assert all(abs(loss - expected) / expected < BOUND for loss, _ in results)
    assert (torch.cat([grad for _, grad in results], dim=-1) - gradient).abs().max() < BOUND


def test_ignored_targets_alone_give_zero_and_no_gradient():
    for loss, grad in run_ranks(2, split_loss, 7, 0.1, 1.0, torch.float64, "all"):
        assert loss == 0 and torch.count_nonzero(grad) == 0


def test_half_precision_logits_have_their_loss_in_fp32_and_their_gradient_in_their_own_dtype():
    case = (50, 0.1, 2.0, torch.bfloat16, "some")
    results, (expected, gradient) = run_ranks(2, split_loss, *case), whole_loss(*case)
    for loss, grad in results:
        assert loss.dtype == torch.float32 and grad.dtype == torch.bfloat16
        assert abs(loss - expected) / expected < 1e-6
    joined = torch.cat([grad for _, grad in results], dim=-1).double()
    assert (joined - gradient).abs().max() / gradient.abs().max() < 2**-8  # one rounding
