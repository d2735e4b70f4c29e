"""torchvision's own networks train as on one device, their classes counted from the dataset: digits, or CIFAR-10 in
the files of its binary version. Its transformer is in stages, of which the first has the class token and positions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from parallelrun.data.images import cifar10
from tests.extras import needs
from tests.parity import assert_equal, parity
from tests.ranks.test_other_modules import IMAGES, Arguments
from tests.unit.data.images.test_image_dataset import batch_file

NETS = Path(__file__).parents[1] / "unit" / "torchvision_nets.py"
SMALL_VIT = {"image_size": 16, "patch_size": 8, "num_layers": 2, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 32}
STAGES = {"pp": 2, "model.before": ("conv_proj",), "model.blocks": ("encoder.layers.*",)}
CELLS: dict[str, dict[str, Any]] = {
    "resnet18": {"strategy.data.kind": "ddp"},
    "mobilenet_v3_small": {"strategy.data.kind": "fsdp"},
    "VisionTransformer": {"strategy.data.kind": "zero1", "model.arguments": Arguments(SMALL_VIT), **STAGES},
}


@pytest.fixture(scope="module")
def cifar_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cifar")
    for number, name in enumerate((*cifar10.TRAIN, *cifar10.TEST)):
        (folder / name).write_bytes(batch_file(8, number))
    return folder


@needs("torchvision")
@pytest.mark.parametrize("net", CELLS)
def test_networks_of_torchvision_read_images_without_further_words(net: str, cifar_folder: Path) -> None:
    module = {"model.name": "module", "model.preset": "module", "model.source": f"{NETS}:{net}", **IMAGES}
    few = {"global_batch": 8, "verify.steps": 1, "dp": 2}
    of_cifar = {"dataset.name": "cifar10", "dataset.path": str(cifar_folder)} if net == "mobilenet_v3_small" else {}
    assert_equal(parity({**module, **few, **of_cifar, **CELLS[net]}))
