"""The loss in chunks on one device: the value and the gradients of the loss of all logits, and where it is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from parallelrun.base.errors import ConfigError
from parallelrun.models.chunked_loss import ChunkedLoss
from parallelrun.models.layers import TokenLoss, VocabHead
from tests.plans import tiny_plan
from tests.vision import RESNET


def computed(chunks: int, dtype: torch.dtype, trained: bool = True) -> dict[str, Tensor]:
    """The loss of 2 x 5 tokens, some of which are ignored, and the gradients of 3 times it."""
    generator = torch.Generator().manual_seed(3)
    head = VocabHead(6, 11, dtype, bias=True)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    head.to(torch.float64 if dtype == torch.float64 else torch.float32)
    head.weight.requires_grad_(trained)
    x = torch.randn(2, 5, 6, generator=generator).to(dtype).requires_grad_()
    targets = torch.arange(10).view(2, 5)
    targets[0, 1:4] = -1
    loss = TokenLoss(0.1)
    if chunks > 1:
        head.defers = True
        loss = ChunkedLoss(loss, head, chunks)
    value = loss(head(x), targets)
    with torch.no_grad():
        assert torch.equal(loss(head(x), targets), value)
    (3 * value).backward()
    tensors = {"loss": value.detach(), "x": x.grad, "weight": head.weight.grad, "bias": head.bias.grad}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-14), (torch.bfloat16, 2**-6), (torch.float16, 2**-9)], ids=str
)
def test_chunks_of_unequal_size_give_the_loss_and_the_gradients_of_all_tokens(dtype: torch.dtype, bound: float) -> None:
    expected, got = computed(1, dtype), computed(3, dtype)
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype
        assert (got[name] - tensor).abs().max() <= bound * tensor.abs().max(), name


def test_a_frozen_weight_gets_no_gradient() -> None:
    assert computed(3, torch.float64, trained=False).keys() == {"loss", "x", "bias"}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"loss_chunks": 33, "cp": 2}, "more than the 32 tokens"),
        ({"loss_chunks": 2, "tp": 4, "layout": "2d"}, "layout=2d computes all logits at once"),
        ({**RESNET, "loss_chunks": 2}, "does not end in a vocabulary head"),
        ({"loss_chunks": 0}, "not a whole number of at least 1"),
    ],
)
def test_other_plans_are_refused(overrides: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_plan(overrides)
