"""2D, 2.5D and 3D tensor parallelism equal one device, alone and composed, and send what the plan predicts.

Every cell has an uneven vocabulary (37) and label smoothing. `pytest --matrix=full` runs FULL_CELLS too.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.matrix import FULL, TWO_STEPS, shared
from tests.parity import assert_equal, parity
from tests.plans import llama
from tests.ranks.test_model_parity import NET, PLACED, Frozen

BASE: dict[str, Any] = {
    "model.layers": 2,
    "model.vocab": 37,
    "dataset.vocab": 37,
    "model.label_smoothing": 0.1,
}
SQUARE = {"layout": "2d", "tp": 4}
ROWS, COLUMNS = ({"layout": "2d", "tp": 2, "grid": grid} for grid in ("2x1", "1x2"))
OBLONG = {"layout": "2d", "tp": 6, "grid": "2x3", "model.hidden": 24, "model.heads": 6}
NINE = {"layout": "2d", "tp": 9, "grid": "3x3", "model.hidden": 18, "model.heads": 3, "global_batch": 9}
DEEP = {"layout": "2.5d", "tp": 8, "depth": 2}
CUBE = {"layout": "3d", "tp": 8}
LEAN = {"strategy.tensor.save_gathered": False}
DROPS = {"dropout": 0.2, "model.attention_dropout": 0.1}
ONE_LAYER = {"model.layers": 1}
EXPERTS = {
    "model.experts": 8, "model.expert_period": 1, "model.shared_experts": 1, "model.router.capacity_factor": 1.25,
    "model.router.aux_coefficient": 0.3, "optimizer.clip": 0.05, "global_batch": 16,
}  # fmt: skip
SPANS = {"ep": 4, "strategy.expert.tp": 1}


def form(name: str) -> dict[str, Any]:
    return {"strategy.tensor.form": name}


def schedule(name: str) -> dict[str, Any]:
    """Stages enough for chunks of two, where the schedule has them."""
    chunks = {"model.layers": 4} if name in ("interleaved", "zbv") else {}
    return {"pp": 2, "strategy.pipeline.kind": name, **chunks}


def data(kind: str) -> dict[str, Any]:
    return {"dp": 2, "strategy.data.kind": kind}


CELLS: dict[str, dict[str, Any]] = {
    "2d stationary_y lean dropout": {**SQUARE, **form("stationary_y"), **LEAN, **DROPS},
    "2d stationary_x, recomputed in full": {**SQUARE, **form("stationary_x"), "recompute": "full", **DROPS},
    "2d stationary_w, llama, recomputed selectively": {
        **SQUARE, **form("stationary_w"), **llama(), "recompute": "selective", "microbatches": 2,
    },
    "2d summa, untied": {**SQUARE, **form("summa"), "model.tied_embeddings": False},
    "2d bert": {**SQUARE, "model.name": "bert", "dropout": 0.1},
    "2x3 on 6, six panels": {**OBLONG, **form("summa"), **DROPS, **ONE_LAYER},
    "2.5d dropout": {**TWO_STEPS, **DEEP, **DROPS, **ONE_LAYER, "recompute": "full"},
    "3d dropout": {**TWO_STEPS, **CUBE, **DROPS, **ONE_LAYER},
    "3d llama lean": {**CUBE, **llama(), **LEAN, **ONE_LAYER, "recompute": "full"},
    "2d mlp on features": {**SQUARE, "model.name": "mlp"},
    "2d stationary_w, user's module, one dropout inside and one behind": {
        **SQUARE, **form("stationary_w"), **PLACED, "model.source": f"{NET}:build_sliceable",
        "model.arguments": Frozen({"dropout": 0.2}),
    },
    "2d dp zero1": {**ROWS, **data("zero1"), **ONE_LAYER},
    "2d dp fsdp": {**TWO_STEPS, **COLUMNS, **data("fsdp"), **ONE_LAYER},
    "2d pp zero_bubble": {**ROWS, **schedule("zero_bubble")},
    "2d pp zero_bubble, panels": {**COLUMNS, **form("summa"), **schedule("zero_bubble")},
    "2d experts, ep over tp, recomputed": {**SQUARE, **EXPERTS, **ONE_LAYER, **SPANS, "recompute": "full"},
}  # fmt: skip
FULL_CELLS: dict[str, dict[str, Any]] = {
    "3x3 on 9": {**NINE, **ONE_LAYER},
    "2x3 on 6, uneven and not square": {**OBLONG, **DROPS, **ONE_LAYER},
    "2x4 of panels, llama": {
        **SQUARE, **form("summa"), **llama(model__kv_heads=8), "tp": 8, "grid": "2x4", "model.heads": 8,
    },
    "2d of four pp zbv, panels": {**SQUARE, **form("summa"), **schedule("zbv"), **data("zero1")},
    "2.5d pp zero_bubble, panels": {**DEEP, **form("summa"), **schedule("zero_bubble")},
    **{f"2d of four dp {name}": {**SQUARE, **data(name)} for name in ("zero1", "fsdp")},
    "2d of four pp zero_bubble": {**SQUARE, **schedule("zero_bubble")},
    "2.5d, two layers": {**DEEP, **DROPS, "recompute": "full"},
    "3d, two layers": {**CUBE, **DROPS},
    "2d dp pp": {**SQUARE, **data("ddp"), **schedule("gpipe")},
    "2d pp zbv": {**SQUARE, **schedule("zbv"), **DROPS},
    **{f"2d pp {name}": {**SQUARE, **schedule(name)} for name in ("naive", "gpipe", "1f1b", "interleaved")},
    **{f"2d {name} {kept}": {**SQUARE, **form(name), "strategy.tensor.save_gathered": kept}
       for name in ("stationary_x", "stationary_y", "stationary_w", "summa") for kept in (True, False)},
    **{f"2.5d {name}": {**DEEP, **form(name)} for name in ("stationary_x", "stationary_y", "stationary_w", "summa")},
    **{f"3d dp {name}": {**CUBE, **data(name)} for name in ("ddp", "zero1", "fsdp")},
    **{f"3d pp {name}": {**CUBE, **schedule(name)} for name in ("1f1b", "interleaved", "zbv", "zero_bubble")},
    "2d pp zero bubble recomputed": {**SQUARE, **schedule("zero_bubble"), "recompute": "full", **DROPS},
    "2.5d pp": {**DEEP, **schedule("1f1b")},
    "2.5d dp zero1": {**DEEP, **data("zero1")},
    "2.5d llama": {**DEEP, **llama()},
    "2.5d bert": {**DEEP, "model.name": "bert"},
    "3d bert": {**CUBE, "model.name": "bert"},
    "3d mlp on features": {**CUBE, "model.name": "mlp"},
    "2x3 llama": {**OBLONG, **llama(model__kv_heads=6)},
    "2d selective": {**SQUARE, "recompute": "selective"},
    "3d selective": {**CUBE, "recompute": "selective"},
    "4x1": {**SQUARE, "grid": "4x1"},
    "1x4": {**SQUARE, "grid": "1x4"},
    "2d dp pp fsdp": {**SQUARE, **data("fsdp"), **schedule("1f1b")},
    "2d fp32": {**SQUARE, "verify.precision": "fp32"},
    "3d fp32": {**CUBE, "verify.precision": "fp32"},
    "2d experts, ep, fsdp": {
        **SQUARE, **EXPERTS, **ONE_LAYER, **data("fsdp"), "ep": 2, "strategy.expert.kind": "capacity",
    },
    "2d experts, ep over tp, zero bubble": {
        **EXPERTS, **SPANS, **schedule("zero_bubble"), "layout": "2d", "tp": 2, "grid": "1x2", "ep": 2,
    },
    "3d experts, ep over tp, recomputed": {**CUBE, **EXPERTS, **ONE_LAYER, **SPANS, "ep": 8, "recompute": "full"},
    "2.5d experts, recomputed": {**DEEP, **EXPERTS, "recompute": "full", **DROPS},
    "2x1 experts, ep over dp x tp": {**SQUARE, **EXPERTS, **SPANS, "tp": 2, "grid": "2x1", "dp": 2},
    "2d experts, cp, two levels": {
        **SQUARE, **EXPERTS, **SPANS, "cp": 2, "ep": 8, "strategy.expert.group_size": 4, "model.router.jitter": 0.1,
    },
    "2d experts, packed": {**SQUARE, **EXPERTS, "dataset.pack": True, "model.seq": 16},
}  # fmt: skip
if FULL:
    CELLS |= FULL_CELLS


@pytest.mark.parametrize("name", shared(CELLS))
def test_a_grid_equals_one_device(name: str) -> None:
    assert_equal(parity({**BASE, **CELLS[name]}, timeout=120))
