"""torchvision's own networks train under data strategies as on one device, their classes counted from the dataset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.extras import needs
from tests.parity import assert_equal, parity
from tests.ranks.test_other_modules import IMAGES, Arguments

NETS = Path(__file__).parents[1] / "unit" / "torchvision_nets.py"
SMALL_VIT = {"image_size": 16, "patch_size": 8, "num_layers": 2, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 32}
CELLS: dict[str, tuple[str, dict[str, Any]]] = {
    "resnet18": ("ddp", {}),
    "mobilenet_v3_small": ("fsdp", {}),
    "VisionTransformer": ("zero1", SMALL_VIT),
}


@needs("torchvision")
@pytest.mark.parametrize("net", CELLS)
def test_networks_of_torchvision_read_images_without_further_words(net: str) -> None:
    kind, arguments = CELLS[net]
    module = {"model.name": "module", "model.preset": "module", "model.source": f"{NETS}:{net}", **IMAGES}
    few = {"model.arguments": Arguments(arguments), "global_batch": 8, "verify.steps": 1}
    assert_equal(parity({**module, **few, "dp": 2, "strategy.data.kind": kind}))
