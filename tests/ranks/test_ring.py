"""strategy=ring: the same training as on one device with any composition, under backward, as predicted to the byte."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from parallelrun.training.loop.schedules import LossScaler
from parallelrun.training.loop.step import train_step
from tests.matrix import FULL, TWO_STEPS, shared
from tests.parity import assert_equal, parity
from tests.pool import run_ranks
from tests.ranks.data_body import run, start

RING = {"strategy.data.kind": "ring"}
HALVING_DOUBLING = {**RING, "strategy.data.algorithm": "halving_doubling"}
HIERARCHICAL = {**RING, "strategy.data.algorithm": "hierarchical", "strategy.data.group_size": 2}
SMALL_BUCKETS = {"strategy.data.bucket_mb": 0.01}
CELLS: dict[str, dict[str, Any]] = {
    "two": {"dp": 2, **RING},
    "three, uneven, many buckets": {
        **TWO_STEPS,
        "dp": 3,
        "global_batch": 12,
        "model.vocab": 37,
        **RING,
        **SMALL_BUCKETS,
    },
    "tp": {"dp": 2, "tp": 2, "strategy.tensor.sequence_parallel": True, **RING},
    "pp, tied": {"dp": 2, "pp": 2, "microbatches": 2, **RING},
    "zero bubble": {**TWO_STEPS, "dp": 2, "pp": 2, "strategy.pipeline.kind": "zero_bubble", **RING},
    "tp and pp": {"dp": 2, "tp": 2, "pp": 2, **RING},
    "2d": {"dp": 2, "tp": 4, "strategy.tensor.kind": "2d", **RING},
    "halving-doubling of three": {"dp": 3, "global_batch": 12, **HALVING_DOUBLING},
    "tree of three": {"dp": 3, "global_batch": 12, **RING, "strategy.data.algorithm": "tree"},
    "hierarchical": {"dp": 4, **HIERARCHICAL},
    "native": {"dp": 2, **RING, "strategy.data.algorithm": "native"},
    "recomputed": {"dp": 2, "recompute": "full", "dropout": 0.1, **RING},
}

if not FULL:  # each of their axes is in another cell
    del CELLS["tp and pp"], CELLS["pp, tied"], CELLS["2d"]


@pytest.mark.parametrize("cell", shared(CELLS))
def test_it_is_the_training_of_one_device_and_sends_what_was_foretold(cell):
    assert_equal(parity(CELLS[cell]))


def done_before_backward_ends() -> tuple[int, int]:
    """(sums that were over when backward was, all sums) of a step whose last hook takes its time."""
    training = start({"dp": 2, "microbatches": 1, **RING, **SMALL_BUCKETS})
    buckets = training.data._buckets
    first_weight = buckets[-1].slots[-1].weight
    found: list[tuple[int, int]] = []

    def slow(_: torch.Tensor) -> None:
        time.sleep(0.5)
        works = [bucket._work for bucket in buckets if bucket._work is not None]
        found.append((sum(work.end.done() for work in works), len(buckets)))

    first_weight.register_hook(slow)
    train_step(training, 1, 0.1, LossScaler(training.config.precision, False))
    return found[0]


def test_sums_are_carried_out_while_backward_goes_on():
    """A thread does them: no collective of a backend is there that could go on by itself."""
    for done, all_of_them in run_ranks(2, done_before_backward_ends):
        assert all_of_them - 2 <= done < all_of_them


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_trains_as_under_ddp(precision):
    setting = {"dp": 2, "precision.name": precision, "optimizer.name": "adamw", **SMALL_BUCKETS}
    ours, theirs = run_ranks(2, run, {**setting, **RING})[0], run_ranks(2, run, setting)[0]
    assert ours.losses == theirs.losses and ours.norms == theirs.norms  # of two numbers the order does not matter
    assert {row for row in ours.counted if row.calls} == set(ours.predicted)
