"""status.json: how a run stands, for people and schedulers. Torch-free."""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from parallelrun import reserve
from parallelrun.errors import EXIT_OK, EXIT_PREEMPTED
from parallelrun.launch.directory import utc_now
from parallelrun.records import write_json

STATES = ("running", "done", "failed", "preempted")


@dataclass
class Status:
    """The writer of one run's status.json. `pid` is the process that watches the ranks. failed_save_step: the last step
    whose checkpoint could not be written, told for the rest of the run; 0 when none failed."""

    directory: Path
    step: int = 0
    failed_save_step: int = 0
    pid: int = field(default_factory=os.getpid)

    def running(self, step: int = 0) -> None:
        """The run goes on, and has reached `step`. A full disk must not end a run that only wanted to say so."""
        self.step = step
        with contextlib.suppress(OSError):
            self._write("running", None, None, None)

    def ended(self, exit_code: int, error: str | None = None, failed_rank: int | None = None) -> None:
        """The run has ended. `error` is one line; `failed_rank` the rank that failed first."""
        state = {EXIT_OK: "done", EXIT_PREEMPTED: "preempted"}.get(exit_code, "failed")
        with contextlib.suppress(OSError):
            write = partial(self._write, state, exit_code, error, failed_rank)
            reserve.insist(self.directory, reserve.STATUS, write)
        reserve.release(self.directory)

    def _write(self, state: str, exit_code: int | None, error: str | None, failed_rank: int | None) -> None:
        fields = {
            "state": state,
            "exit_code": exit_code,
            "error": error,
            "failed_rank": failed_rank,
            "pid": self.pid,
            "host": socket.gethostname(),
            "step": self.step,
            "updated_utc": utc_now(),
        }
        if self.failed_save_step:
            fields["failed_save_step"] = self.failed_save_step
        write_json(self.directory / "status.json", fields)
