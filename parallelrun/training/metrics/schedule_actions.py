"""Measures when a rank runs each action of its pipeline schedule, for the measured Gantt chart of a report."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import Any

from parallelrun.training.metrics.timing import HostClock

MOST_ACTIONS = 1000  # of a rank and a step, which are recorded


class ActionClock:
    """The begin and end of every action of the last step on one rank, at about 1 us per action.

    An action begins when its input has arrived: waiting for the neighbour's message is a gap between actions. The two
    of a pair (`is_pair`) overlap.
    """

    def __init__(self, clock: HostClock):
        self._clock = clock
        self._moments: list[tuple[str, int, int, Any, Any]] = []

    def begin_step(self) -> None:
        """Forget the actions of the step before."""
        self._moments.clear()
        self._host_began, self._began = time.perf_counter(), self._clock.mark()

    @contextmanager
    def action(self, kind: str, stage: int, microbatch: int) -> Iterator[None]:
        """Return a context for one action: kind F, B, I or W (`plan.simulate.Action`)."""
        begin = self._clock.mark()
        yield
        if len(self._moments) < MOST_ACTIONS:
            self._moments.append((kind, stage, microbatch, begin, self._clock.mark()))

    def record(self) -> dict[str, Any]:
        """Return the host, its clock in seconds at the step's begin, and the actions with seconds since then.

        JSON-ready; {} before the first step. Waits for a CUDA stream.
        """
        if not self._moments:
            return {}
        self._clock.resolve(self._moments[-1][-1])
        actions = [
            [kind, stage, microbatch, self._clock.seconds(self._began, begin), self._clock.seconds(self._began, end)]
            for kind, stage, microbatch, begin, end in self._moments
        ]
        actions.sort(key=itemgetter(3))  # of a pair, either may have ended first
        return {"host": socket.gethostname(), "began": self._host_began, "actions": actions}


def schedule_document(step: int, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the document of schedule.json from the record of one rank for each pp index, ascending.

    Seconds count from the first begin on a host. Hosts have no common clock: their first ranks are drawn as if they
    began together, as they do but for the time of the step's last collective.
    """
    first: dict[str, float] = {}
    for record in records:
        first[record["host"]] = min(record["began"], first.get(record["host"], record["began"]))
    rows = []
    for index, record in enumerate(records):
        later = record["began"] - first[record["host"]]
        rows.append({"pp": index, "actions": _shifted(record["actions"], later)})
    return {"schema": 1, "step": step, "ranks": rows}


def _shifted(actions: Sequence[Sequence[Any]], seconds: float) -> list[dict[str, Any]]:
    return [
        {"kind": kind, "stage": stage, "microbatch": microbatch, "begin_s": begin + seconds, "end_s": end + seconds}
        for kind, stage, microbatch, begin, end in actions
    ]
