"""Role layers in their one-device meaning: shapes, dtypes, precision."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from parallelrun.models import functions, layers

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64


def filled(layer: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(seed)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    return layer


@pytest.mark.parametrize(
    "make",
    [
        lambda: layers.ColumnLinear(6, {"": 6}, True, BF16),
        lambda: layers.RowLinear(6, 6, True, BF16),
        lambda: layers.HiddenNorm("layernorm", 6, 1e-5, True, BF16),
        lambda: layers.HiddenNorm("rmsnorm", 6, 1e-5, False, BF16),
        lambda: layers.VocabHead(6, 6, BF16),
        lambda: layers.PositionEmbedding(6, 6, BF16),
    ],
)
def test_weights_are_stored_wide_and_rounded_where_used(make) -> None:
    layer = filled(make())
    x = torch.randn(2, 3, 6).to(BF16)
    out = layer(x)
    assert out.dtype == BF16 and layer.weight.dtype == F32
    out.float().sum().backward()
    assert layer.weight.grad.dtype == F32 and layer.weight.grad.abs().sum() > 0
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(parameter.to(BF16))
    assert torch.equal(layer(x), out)


@pytest.mark.parametrize("wide", ["weight", "bias"])
def test_a_frozen_weight_or_bias_may_be_stored_wider_than_the_other(wide: str) -> None:
    """ZeRO keeps only what is trained in the compute dtype."""
    x, weight, bias = torch.randn(3, 6), torch.randn(6, 6), torch.randn(6)
    rounded, mixed = (
        [one.to(BF16) if both or name != wide else one for name, one in (("weight", weight), ("bias", bias))]
        for both in (True, False)
    )
    assert torch.equal(functions.linear(x, *mixed, BF16), functions.linear(x, *rounded, BF16))
    (scale, shift), (wide_scale, wide_shift) = (
        [w[0] if w.dim() == 2 else w for w in pair] for pair in (rounded, mixed)
    )
    normed = functions.normalise("layernorm", x.to(BF16), wide_scale, wide_shift, 1e-5)
    assert torch.equal(normed, functions.normalise("layernorm", x.to(BF16), scale, shift, 1e-5))


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_norms_compute_wider_than_bf16(kind: str) -> None:
    x = (torch.randn(64, 512) + 100).to(BF16)  # a mean that bf16 sums would get wrong
    weight = torch.ones(512)
    out = layers.normalise(kind, x, weight, torch.zeros(512) if kind == "layernorm" else None, 1e-5)
    exact = layers.normalise(kind, x.double(), weight, None, 1e-5)
    assert ((out.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-3).all()  # one rounding of the result


def test_loss_sums_in_fp32_over_valid_targets_only() -> None:
    logits = torch.randn(2, 4, 10).to(BF16)
    targets = torch.tensor([[1, 2, -1, 3], [-100, 0, 9, -7]])
    loss = layers.TokenLoss()(logits, targets)
    each = functional.cross_entropy(logits.float().view(8, 10), targets.clamp(min=0).view(8), reduction="none")
    assert loss.dtype == F32
    torch.testing.assert_close(loss, each[targets.view(8) >= 0].sum())
    assert layers.TokenLoss()(logits, torch.full((2, 4), -1)) == 0


def test_rotation_keeps_lengths_and_depends_on_distance_only() -> None:
    query, key = torch.randn(2, 1, 1, 1, 8, dtype=F64).expand(2, 1, 1, 6, 8)
    query, key = (functions.rotate(one, functions.Rotary(10000.0)) for one in (query, key))
    scores = (query @ key.transpose(-1, -2))[0, 0]
    torch.testing.assert_close(query.norm(dim=-1), query.norm(dim=-1)[..., :1].expand(1, 1, 6))
    for distance in range(6):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
