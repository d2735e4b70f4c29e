"""Compiled blocks train as on one device and send the same: one file, whose ranks import the compiler once.

Compilation takes some five seconds a rank and case.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.matrix import FULL
from tests.parity import assert_equal, parity
from tests.ranks.test_grid_parity import BASE, CUBE, DROPS, ONE_LAYER, SQUARE
from tests.ranks.test_tensor_parity import APART, GSHARD, SEQUENCE, SHARED

# The first layer of these has no experts. Experts are not compiled: tests/unit/models/test_recompute.py.
EXPERTS = {"tp": 2, **GSHARD, **SHARED}
CELLS: dict[str, dict[str, Any]] = {
    "sequence parallel, no experts": {"tp": 2, "model.layers": 1, **SEQUENCE},
}
if FULL:
    CELLS |= {
        "1x2": {**BASE, **SQUARE, "tp": 2, "grid": "1x2", **ONE_LAYER, "dropout": 0.1},
        "whole": EXPERTS,
        "sequence parallel": {**EXPERTS, **SEQUENCE},
        "whole, no experts": {"tp": 2, "model.layers": 1},
        "apart, no experts": {"tp": 2, "model.layers": 1, **APART},
        "3d, recomputed": {**BASE, **CUBE, "recompute": "full", **DROPS},
    }


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS)
def test_compiled_blocks_equal_one_device(cell: str) -> None:
    assert_equal(parity({**CELLS[cell], "compile": True}, timeout=300))
