"""Image classifiers under any plan equal one device: gradients, running statistics, validation loss; to the byte."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity import assert_equal, parity
from tests.vision import ALEXNET, BOTTLENECK, RESNET, VGG

ZERO1, FSDP = {"strategy.data.kind": "zero1"}, {"strategy.data.kind": "fsdp"}
PIPELINE: dict[str, Any] = {"pp": 2, "microbatches": 4, "model.norm_samples": "2"}
CELLS: dict[str, dict[str, Any]] = {
    "ddp, the global batch as one set": {**RESNET, "dp": 2},
    "zero1, the global batch as one set": {**RESNET, "dp": 2, **ZERO1},
    "fsdp, the global batch as one set": {**RESNET, "dp": 2, **FSDP},
    "hsdp, four replicas": {**RESNET, "dp": 4, **FSDP, "strategy.data.shard": 2},
    "ddp, sets of a replica and a half": {**RESNET, "dp": 4, "global_batch": 24, "model.norm_samples": "8"},
    "ddp, sets of half a replica": {**RESNET, "dp": 2, "model.norm_samples": "4"},
    "ddp, one set a microbatch": {**RESNET, "dp": 2, "microbatches": 2, "model.norm_samples": "4"},
    "zero1, two sets a microbatch": {**RESNET, "dp": 2, "microbatches": 2, "model.norm_samples": "2", **ZERO1},
    "fsdp, sets of half a replica": {**RESNET, "dp": 2, "model.norm_samples": "4", **FSDP},
    "fsdp, kept": {**RESNET, "dp": 2, **FSDP, "strategy.data.reshard_after_forward": False},
    "bottlenecks behind a large stem": {**BOTTLENECK, "dp": 2, "model.label_smoothing": 0.1},
    "recompute=full": {**RESNET, "dp": 2, "recompute": "full"},
    "recompute=selective": {**RESNET, "dp": 2, "recompute": "selective"},
    "recompute=full, own sets": {**RESNET, "dp": 2, "recompute": "full", "model.norm_samples": "4", "microbatches": 2},
    "1f1b": {**RESNET, **PIPELINE, "schedule": "1f1b"},
    "gpipe of four stages": {**BOTTLENECK, **PIPELINE, "pp": 4, "schedule": "gpipe"},
    "interleaved, recomputed": {**RESNET, **PIPELINE, "schedule": "interleaved", "recompute": "full"},
    "zero bubble": {**RESNET, **PIPELINE, "schedule": "zero_bubble"},
    "v, recomputed": {**RESNET, **PIPELINE, "schedule": "zbv", "recompute": "full"},
    "1f1b under ddp": {**RESNET, **PIPELINE, "schedule": "1f1b", "dp": 2},
    "interleaved under fsdp": {**RESNET, **PIPELINE, "schedule": "interleaved", "dp": 2, **FSDP},
    "alexnet's linear layers over tp": {**ALEXNET, "tp": 2, "dropout": 0.5},
    "vgg, dp x tp x pp": {
        **VGG,
        "dp": 2,
        "tp": 2,
        "pp": 2,
        "schedule": "1f1b",
        "microbatches": 4,
        "dropout": 0.1,
        **ZERO1,
    },
    "alexnet in a pipeline": {**ALEXNET, "pp": 2, "schedule": "1f1b", "microbatches": 4, "dropout": 0.5},
    "alexnet with dropout": {**ALEXNET, "dp": 2, "dropout": 0.5},
    "vgg with dropout under fsdp": {**VGG, "dp": 2, "dropout": 0.5, **FSDP, "microbatches": 2},
}


@pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS)
def test_an_image_classifier_equals_one_device(cell: dict[str, Any]) -> None:
    assert_equal(parity(cell))


@pytest.mark.parametrize("sets", [None, "4"])
def test_in_fp32_too(sets: str | None) -> None:
    assert_equal(parity({**RESNET, "dp": 2, "model.norm_samples": sets, "verify.precision": "fp32"}))
