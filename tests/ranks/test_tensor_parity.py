"""Megatron's tensor strategy equals one device, with and without experts, and sends what the plan predicts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from parallelrun.planner.resolve.resolve_config import resolve
from parallelrun.training.loop.build import build
from parallelrun.training.loop.schedules import LossScaler
from parallelrun.training.loop.step import train_step
from tests.matrix import FULL as FULL_RUN
from tests.matrix import shared
from tests.parity import assert_equal, parity
from tests.plans import llama, tiny_config
from tests.pool import run_ranks

SEQUENCE = {"strategy.tensor.sequence_parallel": True}
APART = {"strategy.tensor.overlap": False}
SELECTIVE, FULL = {"recompute": "selective"}, {"recompute": "full"}
ZERO_BUBBLE = {"pp": 2, "strategy.pipeline.kind": "zero_bubble"}
EXPERTS = {"model.experts": 4, "model.expert_ffn": 24}  # in the second of two layers
SHARED = {"model.shared_experts": 1}


def router(kind: str, **settings: Any) -> dict[str, Any]:
    settings = {"kind": kind, "aux_coefficient": 0.1, **settings}
    return EXPERTS | {f"model.router.{key}": value for key, value in settings.items()}


TOP_K = router("top_k")
GSHARD = router("gshard", second_expert="random", capacity_factor=1.0, z_coefficient=0.1)
SWITCH = router("switch", top_k=1, renormalise="none", capacity_factor=1.0, jitter=0.1)
CHOICE = router("expert_choice", capacity_factor=1.0, aux_coefficient=0.0)
AUX_FREE = router("top_k", score="sigmoid", scaling=2.5, bias_rate=1e-3, aux_coefficient=1e-4)

CELLS: dict[str, dict[str, Any]] = {
    "apart": {"tp": 2, **APART},
    "sequence, apart, kv heads copied": {"tp": 4, **llama(), **SEQUENCE, **APART},
    "one kv head, sequence": {"tp": 4, **llama(model__kv_heads=1), **SEQUENCE},
    "a rank without vocabulary": {"tp": 4, "model.vocab": 3, "dataset.vocab": 3, "model.label_smoothing": 0.1},
    "uneven vocabulary, sequence": {"tp": 4, "model.vocab": 7, "dataset.vocab": 7, **SEQUENCE},
    "dropout, sequence, selective": {"tp": 2, "dropout": 0.2, **SEQUENCE, **SELECTIVE},
    "sequence, apart, full": {"tp": 2, **SEQUENCE, **APART, **FULL},
    "mlp on features": {"tp": 4, "model.name": "mlp", "model.preset": "mlp", "dropout": 0.1},
    "top_k": {"tp": 2, **TOP_K, **SEQUENCE},
    "gshard, full": {"tp": 2, **GSHARD, **FULL, "microbatches": 2},
    "switch, sequence": {"tp": 2, **SWITCH, **SEQUENCE},
    "expert choice": {"tp": 2, **CHOICE, **SEQUENCE},
    "aux free": {"tp": 2, **AUX_FREE},
    "shared expert, sequence, apart": {"tp": 4, **AUX_FREE, **llama(), **SHARED, **SEQUENCE, **APART},
    "shared expert, sequence, full": {"tp": 2, **GSHARD, **SHARED, **SEQUENCE, **FULL},
    "shared expert, sequence, zero bubble": {"tp": 2, **GSHARD, **SHARED, **SEQUENCE, **ZERO_BUBBLE},
    "shared expert, dropout, full, zero bubble": {"tp": 2, **GSHARD, **SHARED, "dropout": 0.1, **FULL, **ZERO_BUBBLE},
}


# What the full matrix adds: each of its settings stands in another cell.
FULL_MATRIX = ("sequence, apart, kv heads copied", "shared expert, dropout, full, zero bubble")


@pytest.mark.parametrize("cell", shared(cell for cell in CELLS if FULL_RUN or cell not in FULL_MATRIX))
def test_a_tensor_parallel_training_is_that_of_one_device(cell: str) -> None:
    assert_equal(parity(CELLS[cell]))


def losses_of(overrides: dict[str, Any]) -> list[float]:
    """Body of a rank: the losses of three steps."""
    config = tiny_config(overrides)
    training = build(config, resolve(config), torch.device("cpu"))
    scaler = LossScaler(config.precision, scaled=False)
    return [train_step(training, step, 0.01, scaler).loss for step in (1, 2, 3)]


@pytest.mark.parametrize(
    ("precision", "bound"), [("fp32", 1e-5), ("bf16", 0.02), *([("fp16", 0.01)] if FULL_RUN else [])]
)
def test_other_precisions_differ_by_their_rounding(precision: str, bound: float) -> None:
    cell = {**AUX_FREE, **SHARED, "model.layers": 2, "precision.name": precision}
    (expected,), losses = run_ranks(1, losses_of, cell), run_ranks(2, losses_of, {**cell, "tp": 2, **SEQUENCE})
    assert losses[0] == losses[1] == pytest.approx(expected, rel=bound)
