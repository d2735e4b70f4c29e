"""Compiled blocks train as on one device and send the same: one file, whose ranks import the compiler once.

Compilation takes some five seconds a rank and case.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.matrix import FULL
from tests.parity import assert_equal, parity
from tests.ranks.test_grid_parity import BASE, CUBE, DROPS, ONE_LAYER, SQUARE
from tests.ranks.test_tensor_experts import GSHARD, SHARED, experts
from tests.ranks.test_tensor_gpt import APART, SEQUENCE, assert_proved

# The first layer of these has no experts.
TENSOR: dict[str, dict[str, Any]] = {"sequence parallel": experts(GSHARD, **SHARED, **SEQUENCE)}
GRIDS: dict[str, dict[str, Any]] = {"1x2": {**SQUARE, "tp": 2, "grid": "1x2", **ONE_LAYER, "dropout": 0.1}}
if FULL:
    TENSOR |= {
        "whole": experts(GSHARD, **SHARED),
        "whole, no experts": {"tp": 2, "model.layers": 1},
        "apart, no experts": {"tp": 2, "model.layers": 1, **APART},
    }
    GRIDS["3d, recomputed"] = {**CUBE, "recompute": "full", **DROPS}


@pytest.mark.parametrize("cell", TENSOR)
def test_compiled_blocks_send_the_same_and_leave_experts_out(cell: str) -> None:
    assert_proved(TENSOR[cell], backend="aot_eager")


@pytest.mark.parametrize("cell", GRIDS)
def test_a_compiled_grid_equals_one_device(cell: str) -> None:
    assert_equal(parity({**BASE, **GRIDS[cell], "compile": True}, timeout=300))
