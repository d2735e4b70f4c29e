"""Modules as people bring them train under data strategies as on one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.parity import assert_equal, parity

NETS = Path(__file__).parents[1] / "unit" / "other_nets.py"
TEXT = {"dataset.name": "pystdlib", "dataset.vocab": None, "model.vocab": None}
SHAPED = f"{NETS}:shaped"


class Arguments(dict[str, Any]):
    """A mapping that can be part of a cache's key."""

    def __hash__(self) -> int:
        return hash(tuple(self.items()))


CELLS = {
    "LSTM": (f"{NETS}:recurrent", {"kind": "LSTM"}, "ddp"),
    "GRU": (f"{NETS}:recurrent", {"kind": "GRU"}, "fsdp"),
    "RNN": (f"{NETS}:recurrent", {"kind": "RNN"}, "zero1"),
    "a tuple": (SHAPED, {"form": "tuple"}, "ddp"),
    "a dict": (SHAPED, {"form": "dict"}, "fsdp"),
    "reads values": (SHAPED, {"reads_values": True}, "ddp"),
}


@pytest.mark.parametrize("cell", CELLS)
def test_modules_as_people_bring_them_are_exact(cell: str) -> None:
    source, arguments, kind = CELLS[cell]
    module = {"model.name": "module", "model.preset": "module", "model.source": source, **TEXT}
    assert_equal(parity({**module, "model.arguments": Arguments(arguments), "dp": 2, "strategy.data.kind": kind}))


IMAGES = {"dataset.name": "digits", "dataset.vocab": None, "model.vocab": None, "global_batch": 16}


def test_a_classifier_as_torchvision_builds_it_reads_images_without_further_words() -> None:
    """torchvision's own ones are in test_torchvision.py."""
    module = {"model.name": "module", "model.preset": "module", "model.source": f"{NETS}:resnet18", **IMAGES}
    assert_equal(parity({**module, "dp": 2, "strategy.data.kind": "fsdp"}))
