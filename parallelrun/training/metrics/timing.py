"""Measures one rank's time per step: computing, waiting for other ranks, reading data, the optimizer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from parallelrun.distributed import comm, torch_private
from parallelrun.planner.contract.plan import EMBEDDING, WORLD
from parallelrun.training.loop.build import Training

ACROSS_STAGES = (WORLD, EMBEDDING)  # groups that join ranks of several stages
# On CUDA a timed step waits for its last kernel, and the next step cannot be launched meanwhile. So only the first
# steps are timed there, and then one in ten.
FIRST_TIMED_ON_DEVICE, TIMED_EVERY_ON_DEVICE = 5, 10


class HostClock:
    """The host's clock, for devices whose calls are synchronous.

    `mark` returns a moment; the `seconds` between two are known after `resolve` has waited for the last one.
    on_device: its moments are those of a stream, not of the host.
    """

    on_device = False
    mark: Callable[[], Any] = staticmethod(time.perf_counter)  # called about every 100 us: no Python of ours

    def resolve(self, last: Any) -> None:
        """Do nothing: the moment is in the past."""

    def seconds(self, began: Any, ended: Any) -> float:
        return float(ended - began)


class CudaClock(HostClock):
    """Events of the current CUDA stream: a moment is when the stream reaches the event."""

    on_device = True

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def resolve(self, last: torch.cuda.Event) -> None:
        last.synchronize()

    def seconds(self, began: torch.cuda.Event, ended: torch.cuda.Event) -> float:
        return float(began.elapsed_time(ended)) / 1e3


def clock_of(device: torch.device) -> HostClock:
    """Return the clock on which a device's work is timed."""
    return HostClock() if device.type == "cpu" else CudaClock()


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step on one rank; compute + comm_exposed + bubble + data is the step time.

    data_s: waiting for this rank's samples, which are read in the background.
    bubble_s: idle for other stages, 0 without a pipeline. This is waiting for messages between stages (including their
    transfer, if it is not overlapped) and, after the schedule, for collectives that join stages (tied weights, the
    step's totals), in which a stage that has finished waits for the last stage.
    comm_exposed_s: all other waiting for collectives, including waiting for slower ranks.
    compute_s: the rest: kernels, Python, the optimizer, and waiting for a core if ranks share cores.
    optimizer_s: the part of compute_s in which gradients are clipped and weights updated.
    On CUDA these are seconds between events of the stream that computes; steps without events have only data_s.
    """

    data_s: float
    compute_s: float | None = None
    comm_exposed_s: float | None = None
    bubble_s: float | None = None
    optimizer_s: float | None = None

    @property
    def fields(self) -> dict[str, float]:
        """The fields that were timed, by their names in metrics.jsonl."""
        return {name: value for name, value in vars(self).items() if value is not None}


class StepClock:
    """Times one step inside `with clock:`, and the optimizer inside `with clock.optimizer():`.

    On CPU every step is timed, at about 2 us per wait. clock: for tests; None: the clock of the device.
    seconds, times: the wall-clock time of the last step and its parts.
    """

    def __init__(self, training: Training, clock: HostClock | None = None):
        self._reader = training.reader
        self._clock = clock or clock_of(training.mesh.device)
        self._has_ranks = training.plan.world > 1
        self._has_stages = training.plan.mesh.size("pp") > 1
        self._num_steps = 0
        self._is_timed = False
        self._undo = ExitStack()
        self._host_began = self._read_before = 0.0
        self.seconds = 0.0
        self.times = StepTimes(0.0)

    def __enter__(self) -> StepClock:
        self._num_steps += 1
        number = self._num_steps
        often = not self._clock.on_device or number <= FIRST_TIMED_ON_DEVICE
        self._is_timed = often or number % TIMED_EVERY_ON_DEVICE == 0
        self._waits: list[tuple[bool, Any, Any]] = []  # (whether it is idle for another stage, its moments)
        self._optimizer: list[tuple[Any, Any]] = []
        self._read_before = self._reader.seconds
        if self._is_timed and self._has_ranks:
            waits = torch_private.timed_waits(self._waited, self._clock.mark, self._clock.on_device)
            self._undo.enter_context(waits)
        self._host_began = time.perf_counter()
        self._began = self._clock.mark() if self._is_timed else None
        return self

    def __exit__(self, *error: object) -> None:
        ended = self._clock.mark() if self._is_timed else None
        self._undo.close()
        if self._is_timed:
            self._clock.resolve(ended)
        self.seconds = time.perf_counter() - self._host_began
        self.times = self._parts(ended)

    @contextmanager
    def optimizer(self) -> Iterator[None]:
        """Return a context for clipping and the update."""
        if not self._is_timed:
            yield
            return
        began = self._clock.mark()
        yield
        self._optimizer.append((began, self._clock.mark()))

    def _waited(self, is_message: bool, began: Any, ended: Any) -> None:
        label = comm.current_label()
        is_idle = self._has_stages and (is_message or (label is not None and label.axis in ACROSS_STAGES))
        self._waits.append((is_idle, began, ended))

    def _parts(self, ended: Any) -> StepTimes:
        data = self._reader.seconds - self._read_before
        if not self._is_timed:
            return StepTimes(data)
        seconds = self._clock.seconds
        idle = sum(seconds(*moments) for is_idle, *moments in self._waits if is_idle)
        exposed = sum(seconds(*moments) for is_idle, *moments in self._waits if not is_idle)
        optimizer = sum(seconds(*moments) for moments in self._optimizer)
        compute = seconds(self._began, ended) - data - exposed - idle
        return StepTimes(data, compute, exposed, idle, optimizer)
