"""Reading ahead: the next steps are read while one trains, in a thread or in processes, and every batch is the same."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from parallelrun.base.errors import EnvironmentProblem
from parallelrun.data.order import Sampler
from parallelrun.distributed.mesh import Mesh
from parallelrun.planner.model.definitions import Split
from parallelrun.training.loop import reader as reader_module
from parallelrun.training.loop.reader import HostSamples, ReadAhead, Reader, _num_workers
from tests.matrix import every
from tests.plans import tiny_plan

STEPS = 6


@dataclass
class Tokens(Split):
    """Windows of eight tokens. seconds: of each sample; broken: the sample that cannot be read."""

    seconds: float = 0.0
    broken: int | None = None
    readers: set[tuple[int, str]] = field(default_factory=set)  # process and thread of every read in this process

    def __len__(self) -> int:
        return 64

    def sample(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        self.readers.add((os.getpid(), threading.current_thread().name))
        time.sleep(self.seconds)
        if index == self.broken:
            raise EnvironmentProblem("sample 5 is torn")
        tokens = np.arange(index * 8, index * 8 + 9)
        return tokens[:-1], tokens[1:]


class Files(Tokens):
    decodes_files = True


def reader(split: Split, **options: Any) -> Reader:
    plan = tiny_plan(global_batch=4)
    sampler = Sampler(len(split), plan.batch.global_batch, seed=7)
    return Reader(split, sampler, plan, Mesh(plan.mesh, 0, torch.device("cpu")), **options)


def batches(one: Reader, steps: Any = range(1, STEPS + 1)) -> list[tuple[torch.Tensor, ...]]:
    found = [one.batch(step) for step in steps]
    one.close()
    return [(batch.inputs, batch.targets, batch.sample_ids) for batch in found]  # type: ignore[misc]


def same(left: list[tuple[torch.Tensor, ...]], right: list[tuple[torch.Tensor, ...]]) -> bool:
    return all(torch.equal(a, b) for one, other in zip(left, right, strict=True) for a, b in zip(one, other))


ORDERS = {"in order": range(1, STEPS + 1), "resumed": [4, 5, 6], "evaluated twice": [1, 2, 1, 2],
          "in any order, beyond the last": [3, 1, 6, 7, 8]}  # fmt: skip


@pytest.mark.parametrize(
    ("split", "steps"),  # processes, which read files, by default in every second order
    [pytest.param(split, order, id=f"{split.__name__}-{name}") for split in (Tokens, Files)
     for name, order in (ORDERS.items() if split is Tokens else every(2, ORDERS.items()))],
)  # fmt: skip
def test_reading_ahead_gives_the_batches_that_reading_at_once_gives(split: type[Tokens], steps: Any) -> None:
    ahead = batches(reader(split(), last_step=STEPS, num_workers=2), steps)
    assert same(ahead, batches(reader(Tokens()), steps))


def test_slices_are_read_by_one_thread_and_files_by_processes() -> None:
    tokens, files = Tokens(), Files()
    batches(reader(tokens, last_step=STEPS))
    assert {name for _, name in tokens.readers} == {threading.main_thread().name, "reader_0"}
    batches(reader(files, last_step=STEPS, num_workers=2))
    assert not files.readers, "the rank decoded a file itself"


def test_a_reader_that_keeps_up_costs_the_step_nothing() -> None:
    one = reader(Tokens(seconds=0.005), last_step=STEPS)  # 20 ms a batch
    one.batch(1)
    before = one.seconds
    for step in range(2, STEPS + 1):
        time.sleep(0.06)  # a step trains for longer than a batch takes to read
        one.batch(step)
    assert one.seconds - before < 0.005 * (STEPS - 1)


@pytest.mark.parametrize("split", [Tokens, Files])
def test_what_reading_raises_comes_up_in_the_step_that_needs_it(split: type[Tokens]) -> None:
    order = reader(Tokens()).samples.sampler
    broken = int(order.indices(3, 0, 1)[0][0])
    one = reader(split(broken=broken), last_step=STEPS, num_workers=1)
    one.batch(1)
    one.batch(2)
    with pytest.raises(EnvironmentProblem, match=r"^sample 5 is torn$"):
        one.batch(3)
    one.close()


class Killer(Files):
    def sample(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


def test_a_killed_worker_process_is_an_error_that_names_the_option() -> None:
    one = reader(Killer(), last_step=STEPS, num_workers=1)
    with pytest.raises(EnvironmentProblem) as caught:
        one.batch(1)
    assert caught.value.problems[0].where == "dataset.num_workers"


def test_closing_ends_the_worker_processes() -> None:
    one = reader(Files(), last_step=STEPS, num_workers=2)
    one.batch(1)
    workers = [worker.pid for worker in multiprocessing.active_children()]
    one.close()
    assert len(workers) == 2
    for pid in workers:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_ranks_that_need_no_samples_start_nothing() -> None:
    plan = tiny_plan(pp=4, global_batch=4, microbatches=4)
    middle = Mesh(plan.mesh, 1, torch.device("cpu"))
    one = Reader(Files(), Sampler(64, 4, seed=7), plan, middle, last_step=STEPS)
    batch = one.batch(1)
    assert one._ahead is None and batch.inputs is None and batch.targets is None and len(batch) == 4


@pytest.mark.parametrize("asked,world,expected", [(None, 1, 4), (None, 4, 2), (None, 64, 1), (0, 1, 0), (7, 1, 7)])
def test_spare_cores_decode_unless_told_otherwise(
    asked: int | None, world: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert _num_workers(Files(), asked, world) == expected
    assert _num_workers(Tokens(), asked, world) == 0


def test_under_a_launcher_only_the_ranks_of_this_host_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert _num_workers(Files(), None, 512) == 2


def test_for_a_gpu_the_thread_pins_what_the_device_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[str] = []

    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(threading.current_thread().name)
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    samples = host_samples()
    ahead = ReadAhead(samples, last_step=2, num_workers=0, pin=True)
    ahead.take(1)
    ahead.take(2)
    ahead.close()
    assert pinned == ["MainThread"] * 3 + ["reader_0"] * 3  # inputs, targets and sample ids of each step


def test_training_does_not_wait_for_a_worker_process_to_hand_over_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker answers between two images: waiting for that took 7 % of a small step."""
    takers: list[str] = []

    def handed_over(steps: Any, **options: Any) -> Any:
        for step in options["sampler"]:
            takers.append(threading.current_thread().name)
            yield samples[step]

    samples = host_samples()
    monkeypatch.setattr(reader_module, "DataLoader", handed_over)
    ahead = ReadAhead(samples, last_step=4, num_workers=2, pin=False)
    for step in range(1, 5):
        assert torch.equal(ahead.take(step).sample_ids, samples[step].sample_ids)
    assert takers == ["MainThread", "reader_0", "reader_0", "reader_0"]


def host_samples() -> HostSamples:
    return replace(reader(Tokens()).samples)
