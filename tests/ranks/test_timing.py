"""Where the time of a step goes: a delay that is planted shows in the right field of the right rank."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from parallelrun.data.order import Sampler
from parallelrun.distributed import comm, torch_private
from parallelrun.planner.model.definitions import Split
from parallelrun.planner.resolve.resolve_config import resolve
from parallelrun.training.loop.build import Training, build
from parallelrun.training.loop.reader import Reader
from parallelrun.training.loop.schedules import LossScaler
from parallelrun.training.loop.step import train_step
from parallelrun.training.metrics.step_records import mean_times, median_times
from parallelrun.training.metrics.timing import StepClock, StepTimes
from tests.plans import tiny_config
from tests.pool import run_ranks

DELAY = 0.2
WAITS = {"comm_exposed_s", "bubble_s", "data_s"}


def slow_forward(training: Training, seconds: float) -> None:
    """Every microbatch takes `seconds` more: asleep, so that ranks do not fight for cores."""
    training.model_parts[0].register_forward_pre_hook(lambda *_: time.sleep(seconds))


def slow_backward(training: Training, seconds: float) -> None:
    training.model_parts[0].register_full_backward_pre_hook(lambda *_: time.sleep(seconds))


def slow_data(training: Training, seconds: float) -> None:
    """Reading a step takes `seconds` and the step that hides it: four samples are read, in the background."""
    split = training.dataset.train

    class SlowSplit(Split):
        def __len__(self) -> int:
            return len(split)

        def sample(self, index: int) -> tuple[np.ndarray, np.ndarray]:
            time.sleep((seconds + 0.05) / 4)
            return split.sample(index)

    sampler = Sampler(len(split), training.plan.batch.global_batch, training.config.seed)
    training.reader = Reader(SlowSplit(), sampler, training.plan, training.mesh, last_step=training.config.steps)


FAULTS = {"forward": slow_forward, "backward": slow_backward, "data": slow_data}


def timed_steps(
    overrides: dict[str, Any], slow: dict[int, tuple[str, float]], of_device: Any = None
) -> list[tuple[dict[str, float], float]]:
    """The parts of some steps and the time of each; slow: rank -> (fault, seconds); of_device: the clock to use."""
    config = tiny_config(overrides)
    training = build(config, resolve(config), torch.device("cpu"))
    scaler, original = LossScaler(config.precision, False), dist.Work.wait
    train_step(training, 1, 0.01, scaler)
    if training.mesh.rank in slow:
        fault, seconds = slow[training.mesh.rank]
        FAULTS[fault](training, seconds)
    clock, steps = StepClock(training, of_device), []
    for step in range(2, 5):
        dist.barrier()
        began = time.perf_counter()
        with clock:
            train_step(training, step, 0.01, scaler, clock=clock)
        steps.append((clock.times.fields, time.perf_counter() - began))
        assert dist.Work.wait is original, "nothing is timed outside"
    return steps


def fastest_step(
    overrides: dict[str, Any], slow: dict[int, tuple[str, float]], of_device: Any = None
) -> list[tuple[dict[str, float], float]]:
    """By rank, the step in which the machine was the least crowded."""
    steps = zip(*run_ranks(2, timed_steps, overrides, slow, of_device))
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
        parts = sum(times[part] for part in (*WAITS, "compute_s"))
        assert parts == pytest.approx(taken, abs=0.05)


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


class FakeStreams:
    """A device whose clock only moves when the test says so, and a step of which the waits are scripted."""

    on_device = True

    def __init__(self) -> None:
        self.now = self._settled = 0.0

    def mark(self) -> float:
        return self.now

    def resolve(self, last: float) -> None:
        self._settled = last

    def seconds(self, began: float, ended: float) -> float:
        assert began <= ended <= self._settled, "torch raises for an event that has not happened"
        return ended - began

    def take(self, seconds: float) -> None:
        self.now += seconds


def device_clock(streams: Any, pp: int = 1) -> StepClock:
    plan = SimpleNamespace(world=2, mesh=SimpleNamespace(size=lambda axis: pp))
    mesh = SimpleNamespace(device=torch.device("cuda"))
    return StepClock(SimpleNamespace(reader=SimpleNamespace(seconds=0.0), mesh=mesh, plan=plan), streams)  # type: ignore[arg-type]


def test_on_a_device_collectives_in_the_stream_and_waits_of_the_stream_count(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = FakeStreams()
    clock = device_clock(streams)
    computing, other = object(), object()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: computing)
    monkeypatch.setattr(torch.cuda.Stream, "wait_event", lambda stream, event: streams.take(event))
    monkeypatch.setattr(dist.Work, "wait", lambda work: streams.take(4.0))
    work = SimpleNamespace(_get_op_type=lambda: 0)
    with clock:
        streams.take(1.0)
        with torch_private.in_stream():  # a blocking all-reduce: in the stream, its own wait is a part of it
            streams.take(2.0)
            dist.Work.wait(work)
        dist.Work.wait(work)  # of one that was started before
        torch.cuda.Stream.wait_event(computing, 8.0)  # FSDP2: the weights have arrived
        torch.cuda.Stream.wait_event(other, 16.0)  # the stream that gathers holds up nobody
        with clock.optimizer():
            streams.take(32.0)
    assert clock.times == StepTimes(0.0, 1.0 + 16.0 + 32.0, 2.0 + 4.0 + 4.0 + 8.0, 0.0, 32.0)


def test_on_a_device_messages_between_stages_are_bubble_and_other_threads_waits_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams = FakeStreams()
    clock = device_clock(streams, pp=2)
    monkeypatch.setattr(dist.Work, "wait", lambda work: streams.take(1.0))
    message = SimpleNamespace(_get_op_type=lambda: int(torch._C._distributed_c10d.OpType.RECV))

    def backward() -> None:  # autograd's thread of the device
        with comm.label("tp", "activations"), torch_private.in_stream():
            streams.take(2.0)

    with clock:
        dist.Work.wait(message)
        thread = threading.Thread(target=backward)
        thread.start()
        thread.join()
    assert clock.times == StepTimes(0.0, 0.0, 2.0, 1.0, 0.0)


def test_on_a_device_one_step_in_ten_is_timed_after_the_first() -> None:
    clock, timed = device_clock(FakeStreams()), []
    original = dist.Work.wait, torch.cuda.Stream.wait_event
    for step in range(1, 31):
        with clock:
            pass
        assert (dist.Work.wait, torch.cuda.Stream.wait_event) == original
        timed += [step] if len(clock.times.fields) > 1 else []
    assert timed == [1, 2, 3, 4, 5, 10, 20, 30]
    assert clock.times.fields.keys() == {"data_s", "compute_s", "comm_exposed_s", "bubble_s", "optimizer_s"}


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
