"""Where the time of a step goes: a delay that is planted shows in the right field of the right rank."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallelrun import torch_private
from parallelrun.data.order import Sampler
from parallelrun.plan.resolve import resolve
from parallelrun.train.build import Training, build
from parallelrun.train.reader import Reader
from parallelrun.train.recorder import mean_times, median_times
from parallelrun.train.scaler import LossScaler
from parallelrun.train.step import train_step
from parallelrun.train.timing import StepClock, StepTimes
from tests.plans import tiny_config
from tests.pool import run_ranks

DELAY = 0.2
WAITS = {"comm_exposed_s", "bubble_s", "data_s"}


def slow_forward(training: Training, seconds: float) -> None:
    """Every microbatch takes `seconds` more: asleep, so that ranks do not fight for cores."""
    training.parts[0].register_forward_pre_hook(lambda *_: time.sleep(seconds))


def slow_backward(training: Training, seconds: float) -> None:
    training.parts[0].register_full_backward_pre_hook(lambda *_: time.sleep(seconds))


def slow_data(training: Training, seconds: float) -> None:
    """Reading a step takes `seconds` and the step that hides it: four samples are read, in the background."""
    split = training.dataset.train
    slow = SimpleNamespace(sample=lambda index: (time.sleep((seconds + 0.05) / 4), split.sample(index))[1])
    sampler = Sampler(len(split), training.plan.batch.global_batch, training.config.seed)
    training.reader = Reader(slow, sampler, training.plan, training.mesh, last_step=training.config.steps)


FAULTS = {"forward": slow_forward, "backward": slow_backward, "data": slow_data}


def timed_steps(overrides: dict[str, Any], slow: dict[int, tuple[str, float]]) -> list[tuple[dict[str, float], float]]:
    """The parts of some steps and the time of each; slow: rank -> (fault, seconds)."""
    config = tiny_config(overrides)
    training = build(config, resolve(config), torch.device("cpu"))
    scaler, original = LossScaler(config.precision, False), dist.Work.wait
    train_step(training, 1, 0.01, scaler)
    if training.mesh.rank in slow:
        fault, seconds = slow[training.mesh.rank]
        FAULTS[fault](training, seconds)
    clock, steps = StepClock(training), []
    for step in range(2, 5):
        dist.barrier()
        began = time.perf_counter()
        with clock:
            train_step(training, step, 0.01, scaler)
        steps.append((clock.times.known, time.perf_counter() - began))
        assert dist.Work.wait is original, "nothing is timed outside"
    return steps


def fastest_step(overrides: dict[str, Any], slow: dict[int, tuple[str, float]]) -> list[tuple[dict[str, float], float]]:
    """By rank, the step in which the machine was the least crowded."""
    steps = zip(*run_ranks(2, timed_steps, overrides, slow))
    return list(min(steps, key=lambda ranks: max(taken for _, taken in ranks)))


@pytest.mark.parametrize(
    ("overrides", "slow", "expected"),
    [
        ({"dp": 2}, {1: ("forward", DELAY)}, ["comm_exposed_s", "compute_s"]),
        ({"dp": 2, "strategy.data.kind": "fsdp"}, {1: ("forward", DELAY)}, ["comm_exposed_s", "compute_s"]),
        ({"tp": 2}, {0: ("forward", DELAY)}, ["compute_s", "comm_exposed_s"]),
        ({"dp": 2}, {0: ("data", DELAY)}, ["data_s", "comm_exposed_s"]),
        ({"pp": 2, "microbatches": 2}, {0: ("forward", DELAY / 2)}, ["compute_s", "bubble_s"]),
        ({"pp": 2, "microbatches": 2}, {1: ("forward", DELAY / 2)}, ["bubble_s", "compute_s"]),
        # the last stage has drained when the first goes backward: it idles in the step's agreement
        ({"pp": 2, "microbatches": 2, "strategy.pipeline.kind": "gpipe"}, {0: ("backward", DELAY / 2)},
         ["compute_s", "bubble_s"]),
    ],
    ids=["dp", "fsdp", "tp", "data", "first stage", "last stage", "drained"],
)  # fmt: skip
def test_a_delay_shows_where_it_is_and_where_others_wait_for_it(overrides, slow, expected) -> None:
    ranks = fastest_step(overrides, slow)
    for (times, taken), (of_other, _), name in zip(ranks, reversed(ranks), expected):
        assert times[name] >= DELAY * 0.9, ranks
        assert times[name] - of_other[name] >= DELAY / 2, ranks  # what a crowded machine adds, it adds to both
        assert all(times[other] < DELAY / 2 for other in WAITS - {name}), ranks
        assert min(times.values()) >= 0.0, "a wait was counted twice"
        assert sum(times.values()) == pytest.approx(taken, abs=0.05)


def bubble(microbatches: int) -> float:
    overrides = {"pp": 2, "strategy.pipeline.kind": "gpipe", "microbatches": microbatches}
    forward = {rank: ("forward", 0.24 / microbatches) for rank in (0, 1)}
    parts = [{"bubble_measured": times["bubble_s"] / taken} for times, taken in fastest_step(overrides, forward)]
    measured = mean_times(parts)["bubble_measured"]
    assert measured is not None
    return measured


def test_more_microbatches_make_a_smaller_bubble() -> None:
    few, many = bubble(2), bubble(8)
    assert few > many + 0.1, (few, many)
    assert few == pytest.approx(1 / 3, abs=0.1)  # (pp - 1) / (m + pp - 1), as nearly all of the step is forward


def test_on_cuda_a_host_clock_tells_only_what_reading_took() -> None:
    plan = SimpleNamespace(world=2, mesh=SimpleNamespace(size=lambda axis: 1))
    mesh = SimpleNamespace(device=torch.device("cuda"))
    clock = StepClock(SimpleNamespace(reader=SimpleNamespace(seconds=0.0), mesh=mesh, plan=plan))
    original = dist.Work.wait
    with clock:
        assert dist.Work.wait is original
    assert clock.times.known == {"data_s": 0.0}


def test_waits_are_left_alone_when_a_step_fails() -> None:
    original = dist.Work.wait
    with pytest.raises(ZeroDivisionError), torch_private.timed_waits(lambda *_: None):
        assert dist.Work.wait is not original
        raise ZeroDivisionError
    assert dist.Work.wait is original


def test_the_summary_takes_medians_over_steps_and_means_over_ranks() -> None:
    def records(*bubbles: float) -> list[Any]:
        return [SimpleNamespace(step_time_s=2.0, times=StepTimes(0.0, 2.0 - b, 0.0, b)) for b in bubbles]

    ranks = [median_times(records(0.2, 0.4, 1.9)), median_times(records(0.8, 0.8, 0.8))]
    assert ranks[0]["bubble_s"] == 0.4 and ranks[0]["bubble_measured"] == pytest.approx(0.2)
    assert mean_times(ranks)["bubble_measured"] == pytest.approx((0.2 + 0.4) / 2)
    unknown = mean_times([median_times([SimpleNamespace(step_time_s=1.0, times=StepTimes(0.25))])])
    assert unknown["data_s"] == 0.25 and unknown["bubble_measured"] is None and unknown["compute_s"] is None
    assert mean_times([median_times([])])["compute_s"] is None
