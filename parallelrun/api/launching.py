"""Carries out a plan in a process of its own, relays what it prints, and raises its errors here.

The process that calls this may be a notebook's kernel with threads, a GPU in use and a `__main__` of its own: the
launcher and its ranks inherit none of it.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from parallelrun.base import errors
from parallelrun.base.errors import EXIT_INTERRUPTED, EXIT_OK, ConfigError, ParallelrunError, Problem, RunFailed

if TYPE_CHECKING:
    from parallelrun.config.compose import Composed

_CHUNK = 65536


def carry_out(composed: Composed, words: Sequence[str], run_root: Path | None, show: bool) -> Path:
    """Run a configuration to its end; return the run directory.

    words: for the manifest. show: write what the run prints to `sys.stdout` and `sys.stderr`. KeyboardInterrupt stops
    the ranks first. Raises RunFailed with the run's exit code; ConfigError and other errors before a rank was started.
    """
    _refuse_other_launchers()
    from parallelrun.planner.resolve.freeze import freeze

    reading, answer = os.pipe()
    order = {
        "config": freeze(composed.config),
        "given": sorted(composed.given),
        "argv": list(words),
        "overrides": list(composed.overrides),
        "directory": os.fspath(run_root) if run_root else None,
        "parent": os.getpid(),
        "answer": answer,
    }
    try:
        process = _started(order, answer)
    except BaseException:
        os.close(reading)
        raise
    finally:
        os.close(answer)
    with process, open(reading, "rb", buffering=0) as pipe:
        try:
            text, interrupted = _relay(process, pipe, show)
        except BaseException:
            process.kill()
            raise
    document: dict[str, Any] = json.loads(text) if text else {"exit_code": abs(process.returncode) or 1}
    if interrupted or document["exit_code"] == EXIT_INTERRUPTED:
        raise KeyboardInterrupt("the run was interrupted")
    return _directory(document)


def _started(order: dict[str, Any], answer: int) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.Popen(
        [sys.executable, "-m", "parallelrun.api.launcher"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=[answer],
        env=environment,
        start_new_session=True,  # Ctrl-C reaches this process only, which passes it on once
    )
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.write(json.dumps(order).encode())
        process.stdin.close()
    return process


def _relay(process: subprocess.Popen[bytes], pipe: IO[bytes], show: bool) -> tuple[bytes, bool]:
    """(what is written to `pipe`, whether the run was interrupted). Returns when the run has ended.

    A first KeyboardInterrupt lets the ranks unwind, a second one kills them.
    """
    answer, interrupted = b"", False
    with selectors.DefaultSelector() as selector:
        for stream in (process.stdout, process.stderr, pipe):
            assert stream is not None
            selector.register(stream, selectors.EVENT_READ)
        while selector.get_map():
            try:
                for key, _ in selector.select():
                    data = os.read(key.fd, _CHUNK)
                    if not data:
                        selector.unregister(key.fileobj)
                    elif key.fileobj is pipe:
                        answer += data
                    elif show:
                        screen = sys.stdout if key.fileobj is process.stdout else sys.stderr
                        screen.write(data.decode(errors="replace"))
                        screen.flush()
            except KeyboardInterrupt:
                process.send_signal(signal.SIGKILL if interrupted else signal.SIGINT)
                interrupted = True
    process.wait()
    return answer, interrupted


def _directory(answer: dict[str, Any]) -> Path:
    """The directory of a run that has succeeded. Raises the error of one that has not."""
    code, directory = answer["exit_code"], Path(answer["directory"]) if answer.get("directory") else None
    if problems := [Problem(**problem) for problem in answer.get("problems", ())]:
        kind = getattr(errors, answer.get("error", ""), None)
        if isinstance(kind, type) and issubclass(kind, ParallelrunError) and kind is not RunFailed:
            raise kind(*problems, exit_code=code)
        raise RunFailed(*problems, exit_code=code, directory=directory)
    if code != EXIT_OK:
        raise RunFailed(_cause(directory, code), exit_code=code, directory=directory)
    if directory is None:
        cause = "nothing is left to do: the run to resume has reached its last step"
        raise ConfigError(Problem(cause, "resume", "more steps="))
    return directory


def _cause(directory: Path | None, code: int) -> Problem:
    from parallelrun.report.records.find import STATUS
    from parallelrun.report.records.read import read_object

    status = read_object(directory / STATUS) if directory else {}
    rank = status.get("failed_rank")
    said = f"{'' if rank is None else f'rank {rank}: '}{status.get('error') or f'the run ended with exit code {code}'}"
    return Problem(said, os.fspath(directory or ""))


def _refuse_other_launchers() -> None:
    from parallelrun.launch.host.environment import detect

    if (attached := detect(os.environ)) is not None:
        cause = f"the ranks are started from here, and {attached.source} has already started this process as one"
        raise ConfigError(Problem(cause, "environment", command="python SCRIPT, without a launcher"))
