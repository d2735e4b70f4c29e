"""Multi-token prediction and z-loss on one device, beside their formulas, and the plans that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from parallelrun.base.errors import ConfigError
from parallelrun.models.documents import DocumentBounds, tokens_ahead
from parallelrun.models.layers import TokenLoss
from parallelrun.planner.resolve.resolve_config import resolve
from parallelrun.training.loop.build import build
from tests.plans import llama, tiny_config, tiny_plan

AHEAD = {**llama(), "model.mtp_depth": 2, "model.mtp_weight": 0.6, "model.layers": 1, "precision.name": "fp64"}


def normed(x: Tensor, norm: Any) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight


def summed(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def test_the_loss_of_multi_token_prediction_is_that_of_deepseek_v3() -> None:
    """Technical report, equations 21 to 25, on sequences without the positions that have no token further ahead."""
    config = tiny_config(AHEAD)
    (network,) = build(config, resolve(config), torch.device("cpu")).model_parts
    tokens, blocks = torch.randint(32, (3, 9), generator=torch.Generator().manual_seed(3)), network.block
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    weight = blocks("head").head.weight
    hidden = blocks("layers.0")(blocks("embedding")(inputs))
    main = summed(normed(hidden, blocks("head").norm) @ weight.T, targets)
    ahead = []
    for depth in (1, 2):
        first, layer = blocks(f"mtp.{depth - 1}.input"), blocks(f"mtp.{depth - 1}.layer")
        embedded = blocks("embedding").tokens.weight[inputs[:, depth:]]
        both = normed(hidden[:, : 8 - depth], first.hidden_norm), normed(embedded, first.token_norm)
        hidden = layer(both[0] @ first.hidden.weight.T + both[1] @ first.token.weight.T)
        ahead.append(summed(hidden @ weight.T, targets[:, depth:]))
    shifted = tokens_ahead(torch.stack((inputs, targets), 1), None, 2)
    total = network.total_loss(network(inputs, ahead=shifted), targets, shifted)
    torch.testing.assert_close(total, main + 0.6 / 2 * (ahead[0] + ahead[1]))
    torch.testing.assert_close(network.loss(network(inputs), targets), main)


def test_tokens_ahead_end_with_their_document() -> None:
    inputs, targets = torch.arange(6).expand(1, -1), torch.tensor([[1, -1, 3, 4, 5, -1]])
    found = tokens_ahead(torch.stack((inputs, targets), 1), DocumentBounds.of([[3, 2]], 6), 2)
    assert found[0, 0].tolist() == [[1, 2, 3, 4, 5, 5], [2, 3, 4, 5, 5, 5]]
    assert found[0, 1].tolist() == [[-1, 3, -1, 5, -1, -1], [3, -1, -1, -1, -1, -1]]


def test_the_z_loss_is_of_valid_targets_in_training_alone() -> None:
    logits, targets = torch.randn(2, 4, 7, dtype=torch.float64), torch.tensor([[1, -1, 3, 4], [5, 6, -1, 0]])
    loss, plain = TokenLoss(z_loss=0.3), TokenLoss()(logits, targets)
    squares = logits.exp().sum(-1).log() ** 2
    torch.testing.assert_close(loss(logits, targets), plain + 0.3 * squares[targets >= 0].sum())
    assert torch.equal(loss.eval()(logits, targets), plain)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({**AHEAD, "pp": 2, "strategy.pipeline.kind": "zbv"}, "uses the embedding 2 times"),
        ({"model.mtp_depth": 1, "pp": 2, "strategy.pipeline.kind": "zero_bubble"}, "uses the embedding 2 times"),
        (
            {"model.experts": 4, "model.shared_experts": 1, "model.shared_gate": True, "tp": 4, "layout": "2d"},
            "has one",
        ),
        ({"model.experts": 4, "model.shared_gate": True}, "there is no shared expert"),
    ],
)
def test_other_plans_are_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_plan(overrides)
