"""Image classifiers under any plan equal one device: gradients, running statistics, validation loss; to the byte."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from parallelrun.distributed import comm
from parallelrun.models.vision import batch_norm
from parallelrun.models.vision.batch_norm import BatchNorm
from parallelrun.training.loop.build import Training
from tests.matrix import FULL, TWO_STEPS, shared
from tests.parity import assert_equal, parity
from tests.vision import ALEXNET, BOTTLENECK, IMAGES, RESNET, VGG

ZERO1, FSDP = {"strategy.data.kind": "zero1"}, {"strategy.data.kind": "fsdp"}
PIPELINE: dict[str, Any] = {"pp": 2, "microbatches": 4, "model.norm_samples": "2"}
NET = Path(__file__).parents[1] / "unit" / "user_net.py"
USERS: dict[str, Any] = {
    **IMAGES,
    "model.name": "module",
    "model.preset": "module",
    "model.source": f"{NET}:build_images",
}
CELLS: dict[str, dict[str, Any]] = {
    "ddp, the global batch as one set": {**RESNET, "dp": 2},
    "zero1, the global batch as one set": {**RESNET, "dp": 2, **ZERO1},
    "fsdp, the global batch as one set": {**RESNET, "dp": 2, **FSDP},
    "ddp, sets of a replica and a half": {**RESNET, "dp": 4, "global_batch": 24, "model.norm_samples": "8"},
    "ddp, sets of half a replica": {**RESNET, "dp": 2, "model.norm_samples": "4"},
    "ddp, one set a microbatch": {**RESNET, "dp": 2, "microbatches": 2, "model.norm_samples": "4"},
    "fsdp x tp, sets of half a replica": {**RESNET, "dp": 2, "tp": 2, "model.norm_samples": "4", **FSDP},
    "dp x tp, bottlenecks behind a large stem": {**BOTTLENECK, "dp": 2, "tp": 2, "model.label_smoothing": 0.1},
    "recompute=full": {**RESNET, "dp": 2, "recompute": "full"},
    "recompute=full, own sets": {**RESNET, "dp": 2, "recompute": "full", "model.norm_samples": "4", "microbatches": 2},
    "1f1b": {**RESNET, **PIPELINE, "schedule": "1f1b"},
    "gpipe of four stages": {**BOTTLENECK, **PIPELINE, "pp": 4, "schedule": "gpipe"},
    "v, recomputed": {**RESNET, **PIPELINE, "schedule": "zbv", "recompute": "full"},
    "1f1b under ddp": {**RESNET, **PIPELINE, "schedule": "1f1b", "dp": 2},
    "alexnet over tp": {**ALEXNET, "tp": 2, "dropout": 0.5},
    "recompute=full over tp, its sums apart": {
        **RESNET,
        "tp": 2,
        "recompute": "full",
        "strategy.tensor.overlap": False,
    },
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
    "a user's BatchNorms": {**USERS, "dp": 2},
    "a user's BatchNorms, fsdp": {**USERS, "dp": 2, **FSDP, "microbatches": 2, "model.norm_samples": "4"},
    "ring": {**RESNET, "dp": 3, "global_batch": 12, "strategy.data.kind": "ring"},
    "horovod": {**RESNET, "dp": 2, "strategy.data.kind": "horovod", "model.norm_samples": "8"},
    "alexnet with dropout": {**ALEXNET, "dp": 2, "dropout": 0.5},
}

if FULL:  # compiling takes half a minute
    CELLS["compiled"] = {**RESNET, "dp": 2, "compile": True}
    CELLS["compiled over tp"] = {**RESNET, "tp": 2, "compile": True}
    CELLS["zero bubble x tp"] = {**RESNET, **PIPELINE, "schedule": "zero_bubble", "tp": 2}
    CELLS["one channel a rank"] = {**RESNET, "tp": 4}
    CELLS["zero1 x tp, sets over replicas, recomputed"] = {**RESNET, "dp": 2, **ZERO1, "tp": 2, "recompute": "full"}
    CELLS["vgg, stages that begin with split channels, recomputed"] = {
        **VGG, "pp": 4, "tp": 2, "schedule": "gpipe", "microbatches": 4, "recompute": "full", "model.stages": (2, 2),
    }  # fmt: skip


@pytest.mark.parametrize("cell", shared(CELLS.values()), ids=CELLS)
def test_an_image_classifier_equals_one_device(cell: dict[str, Any]) -> None:
    assert_equal(parity(cell))


@pytest.mark.parametrize("sets", [None, "4"])
def test_in_fp32_too(sets: str | None) -> None:
    """After one step the rounding of some updates is above the bound."""
    assert_equal(parity({**TWO_STEPS, **RESNET, "dp": 2, "model.norm_samples": sets, "verify.precision": "fp32"}))


def each_replica_by_itself(training: Training) -> None:
    """The bug that everybody writes first: statistics of the samples that happen to lie here."""
    for layer in norms(training):
        layer.sets = None


def running_statistics_of_one_replica(training: Training) -> None:
    training.statistics._sums_in_step = False


def gradient_as_if_statistics_were_constants(training: Training) -> None:
    """Sums exchanged in forward only: each replica's backward knows its own part of a set."""
    right = comm.all_reduce

    def wrong(tensor: Tensor, group: Any, purpose: str, **options: Any) -> Any:
        is_backward = purpose == "statistics" and tensor.dim() == 3 and not _in_forward()
        return None if is_backward else right(tensor, group, purpose, **options)

    comm.all_reduce = wrong


def moved_by_every_microbatch(training: Training) -> None:
    right, statistics = training.runner._part.loss.forward, training.statistics

    def wrong(*arguments: Tensor) -> Tensor:
        if training.runner._part.training:
            seen = [dict(layer._seen) for layer in norms(training)]
            statistics.finish_step(True)
            for layer, kept in zip(norms(training), seen):
                layer._seen.update(kept)
        return right(*arguments)

    training.runner._part.loss.forward = wrong


def shifted_sets(training: Training) -> None:
    """Sets counted from each replica's first sample instead of the global batch's."""
    for layer in norms(training):
        assert layer.sets is not None
        layer.sets.pieces = batch_norm._pieces(0, training.plan.batch.replica_batch, layer.sets.size)


def norms(training: Training) -> list[BatchNorm]:
    return [module for part in training.model_parts for module in part.modules() if isinstance(module, BatchNorm)]


def _in_forward() -> bool:
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "backward" and frame.f_code.co_filename == batch_norm.__file__:
            return False
        frame = frame.f_back
    return True


OWN_SETS: dict[str, Any] = {**RESNET, "dp": 2, "microbatches": 2, "model.norm_samples": "4"}
FAULTS = {
    each_replica_by_itself: {**RESNET, "dp": 2},
    gradient_as_if_statistics_were_constants: {**RESNET, "dp": 2},
    running_statistics_of_one_replica: OWN_SETS,
    moved_by_every_microbatch: OWN_SETS,
    shifted_sets: {**RESNET, "dp": 4, "global_batch": 24, "model.norm_samples": "8"},
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_bug_is_caught_by_the_verdict(fault: Callable[[Training], None]) -> None:
    assert not parity(FAULTS[fault], fault=fault)["passed"]
