"""Data strategies equal one device: gradients, norms and weight updates, whatever is split, copied or accumulated."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from parallelrun.planner.resolve.resolve_config import resolve
from parallelrun.strategies.data.common.reducer import FlatBucket
from parallelrun.training.loop.build import Training
from parallelrun.training.verify.measure import BOUNDS
from tests.matrix import FULL, TWO_STEPS, shared
from tests.parity import assert_equal, parity
from tests.plans import tiny_config
from tests.pool import run_ranks
from tests.ranks.data_body import SETTING, assemble, run, run_with_evaluation

NAIVE = {"strategy.data.kind": "naive_ddp"}
ZERO1 = {"strategy.data.kind": "zero1"}
ZERO2 = {"strategy.data.kind": "zero2"}
FSDP = {"strategy.data.kind": "fsdp"}
HSDP = {"strategy.data.kind": "fsdp", "strategy.data.shard": 2}
REDUCED_ONCE = {"strategy.data.reduce_each_microbatch": False}
REDUCED_EACH = {"strategy.data.reduce_each_microbatch": True}
GATHERED = {**FSDP, "strategy.data.reshard_after_forward": False}
SMALL_BUCKETS = {"strategy.data.bucket_mb": 0.01}
SEQUENCE = {"strategy.tensor.sequence_parallel": True}
PIPELINE = {"pp": 2, "microbatches": 4}
INTERLEAVED = {**PIPELINE, "strategy.pipeline.kind": "interleaved", "model.layers": 4}
# eps far above a gradient of pure noise (a key's bias), which Adagrad would else make as large as any other
ADAGRAD = {"optimizer.name": "adagrad", "optimizer.eps": 1e-2, "verify.optimizer": "same"}
UNEVEN = {"model.vocab": 37, "dataset.vocab": 37, "global_batch": 16, "optimizer.clip": 0.3}
# What `test_parity.py` does not run: its cells have one bucket, two microbatches, even shards and a tied weight.
CELLS: dict[str, dict[str, Any]] = {
    "naive ddp x tp, accumulation": {"dp": 2, "tp": 2, "microbatches": 2, **NAIVE, **SEQUENCE},
    "naive ddp x pp x tp: a tied weight in two stages": {"dp": 2, "tp": 2, **PIPELINE, **NAIVE, **SEQUENCE},
    "naive ddp, backward in two halves": {"dp": 2, **PIPELINE, **NAIVE, "strategy.pipeline.kind": "zero_bubble"},
    "ddp, many buckets": {"dp": 4 if FULL else 2, "microbatches": 1, **SMALL_BUCKETS},
    "ddp x pp: a tied weight in two stages": {"dp": 2, **PIPELINE},
    "zero1, accumulation": {"dp": 2, "microbatches": 2, **ZERO1, **SMALL_BUCKETS},
    "zero1, an empty chunk": {"dp": 3, "model.hidden": 4, "model.heads": 2, "global_batch": 12, **ZERO1},
    "zero2, accumulation in many buckets": {"dp": 2, "microbatches": 4, **ZERO2, **SMALL_BUCKETS},
    "zero1 x tp, adagrad": {"dp": 2, "tp": 2, **ZERO1, **ADAGRAD},
    "zero2, an empty chunk": {"dp": 3, "model.hidden": 4, "model.heads": 2, "global_batch": 12, **ZERO2},
    "zero2 x tp, sequence parallel": {"dp": 2, "tp": 2, "microbatches": 2, **ZERO2, **SEQUENCE, **SMALL_BUCKETS},
    "zero2, recomputed": {"dp": 2, "microbatches": 2, "recompute": "full", **ZERO2, **SMALL_BUCKETS},
    "zero2, two stages a rank in many buckets": {"dp": 2, **INTERLEAVED, **ZERO2, **SMALL_BUCKETS},
    "fsdp, gathered once": {"dp": 2, "microbatches": 2, **GATHERED},
    "fsdp x pp, adagrad": {"dp": 2, **PIPELINE, **FSDP, **ADAGRAD},
    "fsdp, untied": {"dp": 2, "microbatches": 2, "model.tied_embeddings": False, **FSDP},
    "fsdp, an empty chunk": {"dp": 3, "model.hidden": 4, "model.heads": 2, "global_batch": 12, **FSDP},
    "fsdp x tp, sequence parallel": {"dp": 2, "tp": 2, "microbatches": 2, **FSDP, **SEQUENCE},
    "fsdp, reduced once a step": {"dp": 2, "microbatches": 4, **FSDP, **REDUCED_ONCE},
    "fsdp x pp, reduced once a step": {"dp": 2, **PIPELINE, **FSDP, **REDUCED_ONCE},
    "fsdp x pp, two stages a rank": {"dp": 2, **INTERLEAVED, **FSDP},
    "fsdp x pp, let go between passes": {"dp": 2, **PIPELINE, **FSDP, "strategy.data.reshard_after_forward": True},
    "fsdp under zbv: one weight in two stages of a rank": {
        "dp": 2,
        **INTERLEAVED,
        "strategy.pipeline.kind": "zbv",
        **FSDP,
    },
    "fsdp x zero bubble, reduced in each pass": {
        "dp": 2,
        "pp": 2,
        "microbatches": 2,
        "virtual_stages": 1,
        "strategy.pipeline.kind": "zero_bubble",
        **FSDP,
        **REDUCED_EACH,
    },
    "fsdp under dualpipev, reduced in each pass, split or not": {
        "dp": 2,
        **INTERLEAVED,
        "strategy.pipeline.kind": "dualpipev",
        **FSDP,
        **REDUCED_EACH,
    },
    "hsdp x zero bubble, reduced in each pass": {
        "dp": 4,
        "pp": 2,
        "strategy.pipeline.kind": "zero_bubble",
        "global_batch": 16,
        **HSDP,
        **REDUCED_EACH,
    },
    "fsdp, recomputed": {"dp": 2, "microbatches": 2, "recompute": "full", **FSDP},
    "hsdp, accumulation": {"dp": 4, "microbatches": 2, **HSDP},
    "hsdp x pp, a tied weight in two stages": {"dp": 4, **PIPELINE, "global_batch": 16, **HSDP},
}
# What the full matrix adds: cells of `test_parity.py` with another model, and pairs of settings of other cells.
FULL_MATRIX = (
    "ddp x pp: a tied weight in two stages", "fsdp x pp, two stages a rank", "fsdp x pp, let go between passes",
    "fsdp under zbv: one weight in two stages of a rank", "hsdp x pp, a tied weight in two stages",
    "naive ddp x pp x tp: a tied weight in two stages", "zero1, accumulation", "zero2, an empty chunk",
    "zero2, recomputed", "zero1 x tp, adagrad", "fsdp x pp, adagrad", "fsdp x tp, sequence parallel",
    "fsdp, reduced once a step", "zero2 x tp, sequence parallel",
    "fsdp under dualpipev, reduced in each pass, split or not", "hsdp x zero bubble, reduced in each pass",
    "fsdp x pp, reduced once a step",
)  # fmt: skip


def shapes_of(overrides: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    parameters = resolve(tiny_config({**SETTING, **overrides})).spec.parameters
    return {name: spec.shape for name, spec in parameters.items()}


def on_ranks(overrides: dict[str, Any], function: Any = run, *args: Any) -> list[Any]:
    return run_ranks(resolve(tiny_config({**SETTING, **overrides})).world, function, overrides, *args)


@pytest.mark.parametrize("cell", shared(cell for cell in CELLS if FULL or cell not in FULL_MATRIX))
def test_training_equals_one_device_and_sends_what_the_plan_says(cell):
    document = parity({**TWO_STEPS, **UNEVEN, **CELLS[cell]})
    assert_equal(document)
    assert max(document["max_error"].values()) <= BOUNDS["fp64"]  # of another optimizer the verdict only reports


EVALUATED = {"zero2": ZERO2, "fsdp gathered": GATHERED, **({"zero1": ZERO1, "fsdp": FSDP} if FULL else {})}


@pytest.mark.parametrize("overrides", EVALUATED.values(), ids=EVALUATED)
def test_evaluating_between_steps_changes_nothing(overrides):
    overrides = {"dp": 2, "microbatches": 2, **overrides}
    (alone,) = run_ranks(1, run, {})
    for losses in on_ranks(overrides, run_with_evaluation):
        assert losses == pytest.approx(alone.losses, rel=1e-12)


@pytest.mark.parametrize("norm", ["layernorm", *["rmsnorm"] * FULL])
def test_bf16_gradients_are_those_of_every_other_way_bit_for_bit(norm):
    """FSDP gathers in bf16 what the layers would round, and nothing else."""
    half = {"precision.name": "bf16", "dp": 2, "microbatches": 2, "model.norm": norm}
    ddp, zero1, fsdp = (
        assemble([result.gradients for result in on_ranks({**half, **strategy}, run, 1)], shapes_of(half))
        for strategy in ({}, ZERO1, FSDP)
    )
    assert all(torch.equal(zero1[name], ddp[name]) and torch.equal(fsdp[name], ddp[name]) for name in ddp)


def forget_a_parameter(training: Training) -> None:
    finish, last = training.data.finish_gradients, training.data.parameters[-1].tensor

    def finish_without_the_last() -> None:
        own = last.grad.clone()
        finish()
        last.grad.copy_(own)

    training.data.finish_gradients = finish_without_the_last


def average_each_gradient(training: Training) -> None:
    finish = training.data.finish_gradients

    def finish_and_divide() -> None:
        finish()
        for parameter in training.data.parameters:
            parameter.tensor.grad.div_(2)

    training.data.finish_gradients = finish_and_divide


def forget_a_bucket(training: Training) -> None:
    training.data._buckets[1]._send = lambda: type("Done", (), {"wait": lambda self: None})()


def keep_only_the_last_microbatch(training: Training) -> None:
    for bucket in training.data._buckets:
        bucket.collect = partial(_overwrite, bucket, bucket.collect)


def _overwrite(bucket: FlatBucket, collect: Callable[[], None]) -> None:
    for slot in bucket.slots:
        slot.filled = slot.filled and slot.weight.grad is None
    collect()


def do_not_share_updates(training: Training) -> None:
    training.data.finish_update = lambda: None


def average_in_the_units(training: Training) -> None:
    for module in training.data._modules[1:]:
        module.set_gradient_divide_factor(2.0)


def average_in_the_root(training: Training) -> None:
    training.data._modules[0].set_gradient_divide_factor(2.0)


def keep_only_the_last_pass(training: Training) -> None:
    for reducer in training.data._reducers:
        for bucket in reducer.buckets:
            bucket._reduce = partial(_as_if_first, bucket._reduce)


def _as_if_first(reduce: Callable[[bool], Callable[[], None]], first: bool) -> Callable[[], None]:
    return reduce(first=True)


def reduce_in_the_last_pass_only(training: Training) -> None:
    """What earlier passes have left is let go with the buckets' first reductions."""
    for reducer in training.data._reducers:
        start = reducer._launch_full
        reducer._launch_full = partial(_drop_all_but_the_last, reducer, start)


def _drop_all_but_the_last(reducer: Any, start: Callable[[], None]) -> None:
    bucket = reducer.buckets[0]
    if bucket.num_arrived < len(bucket.weights) * 2:
        for weight in bucket.weights:
            weight.grad = None
    start()


BUGS = {
    "naive ddp: the last gradient is not summed": (NAIVE, forget_a_parameter),
    "naive ddp: gradients are averaged": (NAIVE, average_each_gradient),
    "a bucket is not reduced": ({**SMALL_BUCKETS}, forget_a_bucket),
    "microbatches overwrite": ({}, keep_only_the_last_microbatch),
    "updates stay where they are made": (ZERO1, do_not_share_updates),
    "zero2: the last pass overwrites the shards": (ZERO2, keep_only_the_last_pass),
    "zero2: the first pass is let go": (ZERO2, reduce_in_the_last_pass_only),
    "zero2: updates stay where they are made": (ZERO2, do_not_share_updates),
    "FSDP averages below the root": (FSDP, average_in_the_units),
    "FSDP averages at the root": (FSDP, average_in_the_root),
}


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_seen(bug):
    overrides, fault = BUGS[bug]
    document = parity({**UNEVEN, "dp": 2, "microbatches": 2, **overrides}, fault=fault)
    assert not document["passed"]
    assert document["copies_that_disagree"] or max(document["max_error"].values()) > 1e-3


def reduce_every_microbatch(training: Training) -> None:
    set_last = training.data._set_last
    training.data._set_last = lambda root, last: set_last(root, True)


def test_reducing_more_often_than_planned_is_seen_in_the_account():
    """The numbers stay right, so only the count can tell."""
    once = {"strategy.data.reduce_each_microbatch": False}
    for result in on_ranks({**once, "dp": 2, "microbatches": 2, **FSDP}, run, 1, reduce_every_microbatch):
        assert result.counted != result.predicted
