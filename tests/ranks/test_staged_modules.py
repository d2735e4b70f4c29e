"""Modules whose forward is no chain of modules train in stages as on one device, by `model.before`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.matrix import FULL, shared
from tests.parity import assert_equal, parity
from tests.ranks.test_other_modules import TEXT, Arguments

NETS = Path(__file__).parents[1] / "unit" / "staged_nets.py"
MODULE: dict[str, Any] = {
    "model.name": "module", "model.preset": "module", "model.source": f"{NETS}:build", "model.layers": 4,
    "model.before": ("embed", "positions", "drop"), "model.blocks": ("layers.*",), **TEXT,
}  # fmt: skip
CELLS: dict[str, dict[str, Any]] = {
    "gpipe, between blocks": {"schedule": "gpipe", "model.arguments": Arguments(twist="between blocks")},
    "1f1b, recompute": {"schedule": "1f1b", "recompute": "full"},
    "interleaved, fsdp": {"schedule": "interleaved", "virtual_stages": 2, "dp": 2, "strategy.data.kind": "fsdp"},
    "zbv, zero1": {"schedule": "zbv", "dp": 2, "strategy.data.kind": "zero1"},
    "three stages, tied": {"pp": 3, "model.arguments": Arguments(tied=True)},
    "zero bubble, recompute": {"recompute": "full", "schedule": "zero_bubble"},
}
if FULL:
    CELLS["zero bubble"] = {"schedule": "zero_bubble"}
    CELLS["1f1b, ddp, recompute"] = {**CELLS["1f1b, recompute"], "dp": 2}


@pytest.mark.parametrize("cell", shared(CELLS))
def test_stages_of_a_forward_that_is_no_chain_are_exact(cell: str) -> None:
    assert_equal(parity({**MODULE, "pp": 2, **CELLS[cell]}))


PATCHES: dict[str, dict[str, Any]] = {
    "own parameters, interleaved, fsdp": {**CELLS["interleaved, fsdp"], "model.arguments": Arguments(tokens=True)},
    # In fp32, torch's encoder layers have a kernel of their own for evaluation.
    "layers split by tp": {
        "pp": 1, "tp": 2, "verify.precision": "fp32",
        "model.roles": Arguments({"*.linear1": "column_parallel", "*.linear2": "row_parallel"}),
    },
}  # fmt: skip
if FULL:
    PATCHES["without"] = {}


@pytest.mark.parametrize("cell", PATCHES)
def test_plans_of_an_image_classifier_are_exact(cell: str) -> None:
    images = {"model.source": f"{NETS}:patches", "model.before": ("patches",), "model.blocks": ("encoder.blocks.*",),
              "dataset.name": "digits", "global_batch": 16}  # fmt: skip
    assert_equal(parity({**MODULE, **images, "pp": 2, **PATCHES[cell]}))
