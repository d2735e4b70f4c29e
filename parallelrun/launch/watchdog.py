"""The watcher of a rank that no supervisor of ours watches: inline, or attached under another launcher."""

from __future__ import annotations

import faulthandler
import os
import tempfile
import threading
import time
from collections.abc import Callable
from typing import TextIO

from parallelrun.errors import EXIT_HANG
from parallelrun.launch import stacks
from parallelrun.launch.board import Beat, Board
from parallelrun.launch.failure import Failure
from parallelrun.launch.status import Status

_TICK_S = 0.5
_STATUS_EVERY_S = 2.0


class Watchdog:
    """A thread that keeps status.json fresh and ends a silent rank: stacks into the log, `on_hang`, exit 7."""

    def __init__(
        self,
        board: Board,
        rank: int,
        timeout_s: float,
        log: TextIO,
        on_hang: Callable[[Failure], object],
        status: Status | None,
    ):
        self._board, self._rank, self._timeout_s = board, rank, timeout_s
        self._log, self._on_hang, self._status = log, on_hang, status
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="parallelrun-watchdog")

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        next_status = 0.0
        while not self._done.wait(_TICK_S):
            beat = self._board.read(0)
            if self._status is not None and time.monotonic() >= next_status:
                next_status = time.monotonic() + _STATUS_EVERY_S
                self._status.failed_save_step = self._board.failed_save()
                self._status.running(beat.step)
            if beat.age_s > self._timeout_s:
                self._on_hang(self._describe(beat))
                os._exit(EXIT_HANG)

    def _describe(self, beat: Beat) -> Failure:
        """Put all stacks into the log; a rank that only waits for others is a victim."""
        with tempfile.TemporaryFile("w+") as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            dump = file.read()
        self._log.write(dump)
        self._log.flush()
        at = stacks.pp_rank(beat.step, dump, stopped=False)
        where = "in a collective that not all ranks have joined" if at.waiting else f"in {at.frames[0]}"
        what = f"hangs: no progress for {self._timeout_s:g} s; {where}; the stacks are in the log"
        order = 2 if at.waiting else 1
        return Failure(self._rank, what, EXIT_HANG, time.monotonic_ns(), order, os.getpid(), beat.step, beat.phase)
