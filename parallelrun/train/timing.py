"""Where the time of a step goes on one rank: computing, waiting for other ranks, reading data."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from parallelrun import comm, torch_private
from parallelrun.mesh.runtime import EMBEDDING, WORLD
from parallelrun.train.build import Training

ACROSS_STAGES = (WORLD, EMBEDDING)  # groups that join ranks of several stages


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step on one rank; compute + comm_exposed + bubble + data is the step time.

    data_s: reading and collating this rank's samples.
    bubble_s: idle for other stages, 0 without a pipeline: waits for messages between stages (what a message itself
    takes, where nothing hides it, included) and, after the schedule, waits in the collectives that join stages (tied
    weights, the step's agreement), where a stage that has drained idles until the last one has.
    comm_exposed_s: every other wait for a collective; one that came late because its rank was slow is in it too.
    compute_s: the rest: kernels, Python, the optimizer, and waiting for a core where ranks share them.
    On CUDA a wait only orders streams, so the host clock says nothing about it: all but data_s are None there.
    """

    data_s: float
    compute_s: float | None = None
    comm_exposed_s: float | None = None
    bubble_s: float | None = None

    @property
    def known(self) -> dict[str, float]:
        """The fields that were timed, by the names of metrics.jsonl."""
        return {name: value for name, value in vars(self).items() if value is not None}


class StepClock:
    """Times the waits inside `with clock:`, one step at a time. Costs about 2 us a wait, and nothing on one rank."""

    def __init__(self, training: Training):
        self._reader = training.reader
        self._host_waits = training.mesh.device.type == "cpu"
        self._has_ranks = training.plan.world > 1
        self._has_stages = training.plan.mesh.size("pp") > 1
        self._began = 0.0
        self._seconds = 0.0
        self._read_before = 0.0
        self._exposed = self._idle = 0.0
        self._waits: AbstractContextManager[None] = nullcontext()

    def __enter__(self) -> StepClock:
        self._exposed = self._idle = 0.0
        self._read_before = self._reader.seconds
        self._waits = torch_private.timed_waits(self._waited) if self._host_waits and self._has_ranks else nullcontext()
        self._waits.__enter__()
        self._began = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        self._seconds = time.perf_counter() - self._began
        self._waits.__exit__(None, None, None)

    def _waited(self, is_message: bool, seconds: float) -> None:
        label = comm.current_label()
        if self._has_stages and (is_message or (label is not None and label[0] in ACROSS_STAGES)):
            self._idle += seconds
        else:
            self._exposed += seconds

    @property
    def seconds(self) -> float:
        """Wall-clock time of the last step."""
        return self._seconds

    @property
    def times(self) -> StepTimes:
        """The parts of the last step."""
        data = self._reader.seconds - self._read_before
        if not self._host_waits:
            return StepTimes(data)
        return StepTimes(data, self._seconds - data - self._exposed - self._idle, self._exposed, self._idle)
