"""Where a rank's words go: every rank into `logs/rank_<n>.log`, rank 0's screen output to the terminal as well."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO, cast

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07|\r(?=\n)")


def log_path(directory: Path, rank: int) -> Path:
    """The log of one rank."""
    return directory / "logs" / f"rank_{rank}.log"


def open_log(directory: Path, rank: int) -> int:
    """A descriptor that appends to the log of `rank`."""
    return os.open(log_path(directory, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


class Log:
    """A log that may be on a full disk: what has no room there is lost, and the run goes on."""

    def __init__(self, file: TextIO):
        self._file = file

    def __getattr__(self, name: str) -> Any:
        """Everything else (`fileno`, `encoding`, ...) is the file's."""
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._file.write(text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._file.flush()


class Screen(Log):
    """The terminal with a plain copy in the log. A closed terminal (`| head`) ends the echo, never the run."""

    def __init__(self, terminal: TextIO, log: TextIO):
        super().__init__(terminal)
        self._terminal: TextIO | None = terminal
        self._log = log
        self._descriptor = terminal.fileno()
        self._is_terminal = terminal.isatty()

    def isatty(self) -> bool:
        return self._is_terminal

    def fileno(self) -> int:
        return self._descriptor

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):  # a full disk must not end a run that only wanted to say something
            self._log.write(_CONTROL.sub("", text).replace("\r", "\n"))
        self._try(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._log.flush()
        self._try(None)

    def _try(self, text: str | None) -> None:
        if self._terminal is None:
            return
        try:
            if text is None:
                self._terminal.flush()
            else:
                self._terminal.write(text)
        except (BrokenPipeError, OSError):
            self._terminal = None


def _log_to(descriptor: int) -> TextIO:
    return cast(TextIO, Log(open(descriptor, "w", buffering=1, closefd=False, errors="backslashreplace")))


def redirect(directory: Path, rank: int, keeps_terminal: bool) -> None:
    """Send this process's output to its log for good; with `keeps_terminal`, stdout goes to the terminal too.

    faulthandler writes crashes, and all threads' stacks on SIGUSR1, into the log.
    """
    log = open_log(directory, rank)
    os.dup2(log, 2)
    sys.stderr = _log_to(2)  # for good
    if keeps_terminal:
        terminal = open(1, "w", buffering=1, closefd=False, errors="replace")  # noqa: SIM115
        sys.stdout = cast(TextIO, Screen(terminal, sys.stderr))
    else:
        os.dup2(log, 1)
        sys.stdout = _log_to(1)
    os.close(log)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    faulthandler.enable(file=2, all_threads=True)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)


@contextlib.contextmanager
def copied(directory: Path, rank: int):
    """While a worker runs inline: stdout is copied into its log, stderr (warnings, tracebacks) goes there alone."""
    descriptor = open_log(directory, rank)
    try:
        log = _log_to(descriptor)
        before = sys.stdout
        try:
            sys.stdout = cast(TextIO, Screen(before, log))
        except (OSError, ValueError, AttributeError):  # stdout has no descriptor (captured by a caller)
            sys.stdout = before
        try:
            with contextlib.redirect_stderr(log):
                yield log
        finally:
            with contextlib.suppress(ValueError):
                sys.stdout.flush()
            sys.stdout = before
            log.flush()
    finally:
        os.close(descriptor)
