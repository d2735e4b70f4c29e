"""Starts the processes that follow a run for its trackers, and ends them after it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

MARGIN_S = 2.0  # beyond the time after which such a process ends itself


@contextlib.contextmanager
def following(directory: Path, names: Iterable[str], timeout_s: float) -> Iterator[None]:
    """Let trackers follow the run in `directory` until the body has written its final status.

    They have `timeout_s` seconds more, then they are killed. Nothing that they do ends the body.
    """
    processes = {name: process for name in dict.fromkeys(names) if (process := _start(directory, name)) is not None}
    try:
        yield
    finally:
        try:
            for process in processes.values():
                assert process.stdin is not None
                with contextlib.suppress(OSError):  # it has failed
                    os.write(process.stdin.fileno(), b"\n")  # closing is not enough if another process has the pipe
                    process.stdin.close()
            deadline = time.monotonic() + timeout_s + MARGIN_S
            for name, process in processes.items():
                _wait(process, name, deadline)
        finally:  # after another Ctrl-C
            for process in processes.values():
                process.kill()
                process.wait()


def _start(directory: Path, name: str) -> subprocess.Popen[bytes] | None:
    command = [sys.executable, "-m", "parallelrun.report.trackers.follow", os.fspath(directory), name]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        return subprocess.Popen(  # a session of its own: Ctrl-C and a closed terminal do not reach it
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment, start_new_session=True
        )
    except OSError as error:
        _warn(name, f"cannot be started: {error}")
        return None


def _wait(process: subprocess.Popen[bytes], name: str, deadline: float) -> None:
    try:
        code = process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        _warn(name, "does not answer, not even to the end of training")
        return
    if code not in (0, 1):  # it has told about 1
        _warn(name, f"ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}")


def _warn(name: str, reason: str) -> None:
    print(f"warning: tracker={name} {reason}; the training is not affected", file=sys.stderr, flush=True)
