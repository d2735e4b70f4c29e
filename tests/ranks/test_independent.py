"""Local SGD and DiLoCo: held against their own rules in one process; between meetings nothing of weight is sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from parallelrun.distributed.comm.counter import CommunicationCounter
from parallelrun.planner.contract.plan import SYNC
from parallelrun.planner.predict import prediction
from parallelrun.planner.resolve.resolve_config import resolve
from parallelrun.training.loop.build import Training, build
from parallelrun.training.loop.data_runtime import DataRuntime
from parallelrun.training.loop.schedules import LossScaler
from parallelrun.training.loop.step import train_step
from parallelrun.training.verify.measure import BOUNDS, tensor_errors
from tests.matrix import FULL, shared
from tests.parity import assert_equal, parity
from tests.plans import tiny_config
from tests.pool import run_ranks
from tests.vision import RESNET

LOCAL_SGD = {"strategy.data.kind": "local_sgd", "strategy.data.sync_every": 2}
DILOCO = {"strategy.data.kind": "diloco", "strategy.data.sync_every": 2}
PLAIN_OUTER = {"strategy.data.outer_momentum": 0.0, "strategy.data.outer_nesterov": False}
EXPERTS = {"model.layers": 2, "model.experts": 4, "model.expert_period": 2}
AVERAGING = {**PLAIN_OUTER, "strategy.data.outer_lr": 1.0}
IMAGES = {**RESNET, "model.vocab": None, "dataset.vocab": None, "model.norm_samples": "4"}
# Uneven vocabulary, clipping that bites, ignored targets; never a step that all runs end with.
SETTING = {"model.vocab": 37, "dataset.vocab": 37, "global_batch": 16, "optimizer.clip": 0.05, "steps": 60,
           "model.label_smoothing": 0.1, "verify.steps": 4}  # fmt: skip
CELLS: dict[str, dict[str, Any]] = {
    "local SGD": {"dp": 2, **LOCAL_SGD},
    "local SGD, 4 replicas, accumulation, many buckets": {
        "dp": 4, "microbatches": 2, "strategy.data.bucket_mb": 0.01, **LOCAL_SGD
    },
    "local SGD x tp, sequence parallel": {"dp": 2, "tp": 2, "strategy.tensor.sequence_parallel": True, **LOCAL_SGD},
    "local SGD x 2d": {"dp": 2, "tp": 4, "layout": "2d", "model.vocab": 40, "dataset.vocab": 40, **LOCAL_SGD},
    "local SGD x pp, a tied weight in two stages": {"dp": 2, "pp": 2, **LOCAL_SGD},
    "local SGD under zbv": {"dp": 2, "pp": 2, "strategy.pipeline.kind": "zbv", **LOCAL_SGD},
    "local SGD that ends between two rounds": {"dp": 2, **LOCAL_SGD, "strategy.data.sync_every": 3},
    "local SGD of a network with BatchNorm": {"dp": 2, **LOCAL_SGD, **IMAGES},
    "DiLoCo of a network with BatchNorm": {"dp": 2, **DILOCO, **IMAGES},
    "DiLoCo": {"dp": 2, **DILOCO},
    "DiLoCo, 3 replicas": {"dp": 3, "global_batch": 12, **DILOCO},
    "DiLoCo alone": {"dp": 1, **DILOCO},
    "DiLoCo, heavy ball": {"dp": 2, **DILOCO, "strategy.data.outer_nesterov": False},
    "local SGD alone, split over tp": {"dp": 1, "tp": 2, **LOCAL_SGD},
    "local SGD x cp": {"dp": 2, "cp": 2, "strategy.data.bucket_mb": 0.01, **LOCAL_SGD},
    "DiLoCo x cp x pp, a tied weight in two stages": {"dp": 2, "cp": 2, "pp": 2, **DILOCO},
    "DiLoCo alone, split over cp": {"dp": 1, "cp": 2, **DILOCO},
    "local SGD of replicas whose ranks have different experts": {"dp": 4, "ep": 2, **EXPERTS, **LOCAL_SGD},
    "DiLoCo x pp": {"dp": 2, "pp": 2, **DILOCO},
    "DiLoCo of a replica with ep over dp x tp": {
        "dp": 2, "tp": 2, "ep": 4, "strategy.expert.tp": 1, **EXPERTS, **DILOCO
    },
    "DiLoCo x tp x pp": {"dp": 2, "tp": 2, "pp": 2, **DILOCO},
    "DiLoCo, a last round that is short": {"dp": 2, **DILOCO, "strategy.data.sync_every": 3, "steps": 4},
}  # fmt: skip


RARE = (
    "local SGD, 4 replicas, accumulation, many buckets", "local SGD x 2d", "local SGD that ends between two rounds",
    "DiLoCo of a network with BatchNorm", "DiLoCo, heavy ball", "DiLoCo, 3 replicas",
    "local SGD x pp, a tied weight in two stages", "DiLoCo x cp x pp, a tied weight in two stages", "DiLoCo x tp x pp",
    "DiLoCo of a replica with ep over dp x tp",
)  # fmt: skip
if not FULL:
    CELLS = {name: cell for name, cell in CELLS.items() if name not in RARE}


@pytest.mark.parametrize("cell", shared(CELLS))
def test_every_replica_does_what_the_rule_says_and_sends_what_the_plan_says(cell: str) -> None:
    document = parity({**SETTING, **CELLS[cell]})
    assert_equal(document)
    assert document["equivalence"] == "replay" and document["against"] == "its own rule in one process"
    assert document["max_error"]["grads"] <= 1e-10


def test_adamw_keeps_its_state_where_it_is() -> None:
    """The verdict of `same` reports only; under fp64 its errors are still tiny."""
    for strategy in (LOCAL_SGD, DILOCO):
        document = parity({**SETTING, "dp": 2, **strategy, "verify.optimizer": "same", "optimizer.eps": 1e-3})
        assert document["optimizer"] == "adamw" and max(document["max_error"].values()) <= 1e-10


def average_too_rarely(training: Training) -> None:
    training.data.after_step = lambda step: type(training.data).after_step(training.data, step + 1)


def sum_for_mean(training: Training) -> None:
    average = training.data.average

    def wrong() -> None:
        average()
        for tensor in training.data._weights:
            tensor.mul_(2)

    training.data.average = wrong


def keep_dense_gradients_apart(training: Training) -> None:
    """Ranks of a replica with different experts do not sum the gradients of what they all have."""
    training.data.finish_gradients = lambda: DataRuntime.finish_gradients(training.data)


def average_over_all_of_dp(training: Training) -> None:
    """Experts are averaged with other experts."""
    dp, own = training.mesh.group("dp"), training.plan.worker_axis
    training.mesh._groups[own] = replace(dp, axis=own)


def forget_a_bucket(training: Training) -> None:
    training.data._buckets = training.data._buckets[1:]


def share_gradients(training: Training) -> None:
    """Replicas that exchange their gradients after all."""
    finish = training.data.finish_gradients

    def wrong() -> None:
        finish()
        for parameter in training.parameters:
            torch.distributed.all_reduce(parameter.tensor.grad)
            parameter.tensor.grad /= 2

    training.data.finish_gradients = wrong


def clip_by_the_global_norm(training: Training) -> None:
    clip = training.gradients.clip

    def wrong(norm: float, *others: float) -> float:
        square = torch.tensor(norm**2, dtype=torch.float64)
        torch.distributed.all_reduce(square)
        return clip(float(square) ** 0.5 / 2, *others)

    training.gradients.clip = wrong


def forget_the_momentum(training: Training) -> None:
    after_step = training.data.after_step

    def wrong(step: int) -> None:
        after_step(step)
        for momentum in training.data._momentum:
            momentum.zero_()

    training.data.after_step = wrong


def go_on_from_ones_own_weights(training: Training) -> None:
    """The outer step is taken, and nobody takes over its result."""
    strategy = training.data

    def wrong() -> None:
        kept = [weight.clone() for weight in strategy._weights]
        type(strategy).synchronise(strategy)
        for weight, before in zip(strategy._weights, kept):
            weight.copy_(before)

    strategy.synchronise = wrong


def ascend(training: Training) -> None:
    """The movement with the wrong sign."""
    average = training.data.average

    def wrong() -> None:
        average()
        for tensor in training.data._weights:
            tensor.neg_()

    training.data.average = wrong


BUGS: list[tuple[dict[str, Any], Callable[[Training], None]]] = [
    (LOCAL_SGD, average_too_rarely),
    (LOCAL_SGD, sum_for_mean),
    (LOCAL_SGD, share_gradients),
    (LOCAL_SGD, clip_by_the_global_norm),
    ({**LOCAL_SGD, "strategy.data.bucket_mb": 0.01}, forget_a_bucket),
    (CELLS["local SGD of replicas whose ranks have different experts"], keep_dense_gradients_apart),
    (CELLS["local SGD of replicas whose ranks have different experts"], average_over_all_of_dp),
    (DILOCO, average_too_rarely),
    (DILOCO, forget_the_momentum),
    (DILOCO, go_on_from_ones_own_weights),
    (DILOCO, ascend),
]


@pytest.mark.slow
@pytest.mark.parametrize("strategy, bug", BUGS, ids=lambda value: getattr(value, "__name__", "")[:40])
def test_a_planted_bug_is_caught_by_the_verdict(strategy: dict[str, Any], bug: Callable[[Training], None]) -> None:
    document = parity({**SETTING, "dp": 2, **strategy}, fault=bug)
    assert not document["passed"]


def weights_after(
    overrides: dict[str, Any], steps: int, lr: float
) -> tuple[dict[str, Tensor], list[float], dict[str, int]]:
    """This rank's weights, the losses, and the bytes sent over dp by purpose."""
    config = tiny_config({**SETTING, "precision.name": "fp64", "optimizer.name": "sgd", **overrides})
    training = build(config, resolve(config), torch.device("cpu"))
    scaler = LossScaler(config.precision, scaled=False)
    with CommunicationCounter(training.mesh) as counter:
        losses = [train_step(training, step, lr, scaler).loss for step in range(1, steps + 1)]
    sent = {row.purpose: row.payload_bytes for row in counter.rows()}
    return {p.name: p.tensor.detach().clone() for p in training.parameters}, losses, sent


def after(
    overrides: dict[str, Any], steps: int = 6, lr: float = 0.1
) -> list[tuple[dict[str, Tensor], list[float], dict[str, int]]]:
    return run_ranks(overrides["dp"], weights_after, overrides, steps, lr)


def worst(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max(tensor_errors(one, other).values())


@pytest.mark.parametrize("dp", [2, 3] if FULL else [2])
def test_meeting_after_every_step_is_data_parallel_training(dp: int) -> None:
    """With plain SGD and no clipping (a replica's own clipping is no one else's): H=1 averages away the difference, and
    an outer SGD of rate 1 without momentum is averaging, whatever H."""
    plain = {"dp": dp, "optimizer.clip": 0.0, "global_batch": 12}
    (ddp, losses, _), *_ = after(plain)
    each = {"strategy.data.sync_every": 1}
    for strategy in ({**LOCAL_SGD, **each}, {**DILOCO, **each, **AVERAGING}):
        for weights, found, _ in after({**plain, **strategy}):
            assert worst(weights, ddp) <= BOUNDS["fp64"]
            assert found == pytest.approx(losses, rel=1e-10)


@pytest.mark.parametrize("strategy", [LOCAL_SGD, DILOCO], ids=["local_sgd", "diloco"])
def test_bytes_are_one_part_in_h_of_those_of_ddp(strategy: dict[str, Any]) -> None:
    steps = 4 if FULL else 2
    whole = after({"dp": 2}, steps)[0][2]["gradients"]
    for sync_every in (1, 2, 4) if FULL else (1, 2):
        overrides = {"dp": 2, **strategy, "strategy.data.sync_every": sync_every}
        sent = after(overrides, steps)[0][2]
        assert sent[SYNC] * sync_every == whole and set(sent) == {SYNC, "control"}
        plan = resolve(tiny_config({**SETTING, "precision.name": "fp64", **overrides}))
        (row,) = [row for row in prediction.collectives(plan, 0) if row.purpose == SYNC]
        assert row.payload_bytes * steps // prediction.steps_between(plan, SYNC) == sent[SYNC]
