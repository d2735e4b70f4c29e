"""The saves of a rank, one after another: in the background or not, how long they take, and how they may fail."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from parallelrun.base.context import WorkerContext
from parallelrun.base.errors import SaveFailed
from parallelrun.checkpoint.background import BackgroundWriter
from parallelrun.checkpoint.find import FOLDER
from parallelrun.checkpoint.storage import LocalPart

MAX_FAILED_SAVES = 2  # in a row, then the training stops: it would be lost


@dataclass
class SaveTimes:
    """Seconds of each save: paused, that training stood still; written, until it was complete on the disk."""

    paused: list[float] = field(default_factory=list)
    written: list[float] = field(default_factory=list)

    def facts(self) -> dict[str, Any]:
        """Return the fields of summary.json."""
        return {
            "saves": len(self.written),
            "save_pause_median_s": statistics.median(self.paused) if self.paused else None,
            "save_pause_max_s": max(self.paused, default=None),
            "save_write_median_s": statistics.median(self.written) if self.written else None,
        }


class Saves:
    """The saves of one rank. All ranks that save together make the same decisions.

    background: of the saves beside training, at most one at a time; None if each save waits for the disk.
    failed_steps: of the saves that have failed.
    """

    def __init__(self, context: WorkerContext, background: BackgroundWriter | None):
        self._context, self.background = context, background
        self.times = SaveTimes()
        self.failed_steps: list[int] = []
        self._failed_in_a_row = 0
        self._step = 0  # of the save in the background

    def start(self, step: int, parts: Sequence[LocalPart], extra: Mapping[str, Any], keep: int) -> None:
        """Start a save in the background. The one before it must have been collected."""
        assert self.background is not None
        self.background.start(parts, self._context.directory / FOLDER, step, extra, keep)
        self._step = step

    def write(self, step: int, write: Callable[[], object], is_last: bool) -> SaveFailed | None:
        """Save by calling `write`. Return the error of a failed save if training goes on after it.

        Raises SaveFailed for the last save of a run, and for the second failure in a row.
        """
        began = time.perf_counter()
        try:
            write()
        except SaveFailed as error:
            return self._failed(step, error, is_last)
        self._succeeded(time.perf_counter() - began)
        return None

    def collect(self, wait: bool = True) -> SaveFailed | None:
        """Record how the save in the background has ended, if there is one. Returns and raises what `write` does, and
        raises any other error of the save. wait: also for a save that has not ended."""
        background = self.background
        if background is None or not (background.is_pending if wait else background.is_done):
            return None
        try:
            background.collect()
        except SaveFailed as error:
            return self._failed(self._step, error, False)
        self._succeeded(background.seconds)
        return None

    def before_update(self) -> None:
        """Wait until the weights and the state may change."""
        if self.background is not None and self.background.is_pending:
            began = time.perf_counter()
            self.background.wait_for_copies()
            self.times.paused[-1] += time.perf_counter() - began

    def _succeeded(self, seconds: float) -> None:
        self._failed_in_a_row = 0
        self.times.written.append(seconds)

    def _failed(self, step: int, error: SaveFailed, is_last: bool) -> SaveFailed:
        self.failed_steps.append(step)
        self._failed_in_a_row += 1
        self._context.save_failed(step)
        if is_last or self._failed_in_a_row == MAX_FAILED_SAVES:
            raise error
        return error
