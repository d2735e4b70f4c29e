"""Bytes kept for backward on a grid: what autograd really holds equals the formula, and shrinks as 1 / l^3."""

from __future__ import annotations

from typing import Any

import pytest

from tests.grid_memory_body import saved_by_blocks, saved_by_layer, saved_selectively
from tests.pool import run_ranks

SIZES = {"model.hidden": 32, "model.heads": 4, "model.seq": 16, "model.layers": 1, "model.ffn": 96, "model.vocab": 50}
LLAMA = {
    "model.norm": "rmsnorm", "model.activation": "swiglu", "model.position": "rope", "model.bias": False,
    "model.tied_embeddings": False, "model.kv_heads": 2,
}  # fmt: skip
LEAN = {"strategy.tensor.save_gathered": False}
APART = {"strategy.tensor.overlap": False}
BF16 = {"precision.name": "bf16"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "2d": {"layout": "2d", "tp": 4},
    "2.5d": {"layout": "2.5d", "tp": 8, "depth": 2},
    "3d": {"layout": "3d", "tp": 8},
}


def forms(*names: str) -> list[dict[str, Any]]:
    return [{"strategy.tensor.form": name} for name in names]


FLAT = [*forms("auto", "stationary_x", "stationary_y", "stationary_w", "summa"), LEAN, APART, APART | BF16, LLAMA]
CASES = {
    "2d": [
        *FLAT,
        LLAMA | BF16,
        LEAN | BF16,
        {"dropout": 0.1},
        {"model.attention_dropout": 0.1},
        {"model.activation": "relu"},
    ],
    "2.5d": [{"model.activation": "relu"}, LEAN | LLAMA],
    "3d": [{}, LEAN, LLAMA | BF16, APART | LLAMA],
}


@pytest.mark.parametrize("layout", CASES)
def test_saved_bytes_are_those_of_the_formula(layout):
    cases = [{**SIZES, **LAYOUTS[layout], **case} for case in CASES[layout]]
    world = cases[0]["tp"]
    for case, found in zip(CASES[layout], run_ranks(world, saved_by_blocks, cases, timeout=120)[0], strict=True):
        for name, (counted, predicted) in found.items():
            assert counted == predicted, (case, name, counted, predicted)


def test_selective_recomputation_drops_what_activations_give_and_no_gathered_operand():
    flat = {**SIZES, **LAYOUTS["2d"]}
    cases = [flat | case for case in (*forms("stationary_x", "stationary_y", "summa"), LEAN, LLAMA | BF16)]
    found = run_ranks(4, saved_selectively, cases, timeout=120)[0]
    assert [counted for counted, _ in found] == [predicted for _, predicted in found]


CUBE = {
    "layout": "3d", "model.layers": 1, "model.hidden": 36, "model.heads": 6, "model.ffn": 72, "model.seq": 2,
    "model.vocab": 36, "dataset.vocab": 36, "global_batch": 36,
}  # fmt: skip


def test_low_memory_3d_keeps_one_part_in_l_cubed():
    """On 1, 8 and 27 real ranks, attention itself and parameters left out. A norm keeps a number a row besides, of
    M / l^2 rows: what it adds is taken off. With gathered operands kept it is nearer to 1 / l^2."""
    cases = [{**CUBE, **LEAN}, CUBE]
    measured = {edge: run_ranks(edge**3, saved_by_layer, per_tp(cases, edge**3), timeout=120)[-1] for edge in (1, 2, 3)}
    (whole, rows), _ = measured[1]
    features = whole - 2 * 2 * 4 * rows  # one device's layer norms keep two numbers a row
    for edge in (2, 3):
        (lean, rows), (gathered, _) = measured[edge]
        assert rows == 72 / edge**2 and (lean - 2 * 4 * rows) * edge**3 == features
        assert lean < 1.01 * whole / edge**3 and gathered > 2 * lean


def per_tp(cases: list[dict[str, Any]], tp: int) -> list[dict[str, Any]]:
    return [{**case, "tp": tp} for case in cases]
