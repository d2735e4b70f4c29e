"""torchvision's own networks train as on one device, their classes counted from the dataset; its transformer in
stages, of which the first has the class token and the positions of its forward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.extras import needs
from tests.parity import assert_equal, parity
from tests.ranks.test_other_modules import IMAGES, Arguments

NETS = Path(__file__).parents[1] / "unit" / "torchvision_nets.py"
SMALL_VIT = {"image_size": 16, "patch_size": 8, "num_layers": 2, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 32}
STAGES = {"pp": 2, "model.before": ("conv_proj",), "model.blocks": ("encoder.layers.*",)}
CELLS: dict[str, dict[str, Any]] = {
    "resnet18": {"strategy.data.kind": "ddp"},
    "mobilenet_v3_small": {"strategy.data.kind": "fsdp"},
    "VisionTransformer": {"strategy.data.kind": "zero1", "model.arguments": Arguments(SMALL_VIT), **STAGES},
}


@needs("torchvision")
@pytest.mark.parametrize("net", CELLS)
def test_networks_of_torchvision_read_images_without_further_words(net: str) -> None:
    module = {"model.name": "module", "model.preset": "module", "model.source": f"{NETS}:{net}", **IMAGES}
    assert_equal(parity({**module, "global_batch": 8, "verify.steps": 1, "dp": 2, **CELLS[net]}))
