"""Output of ranks: every rank writes to `logs/rank_<n>.log`; rank 0's stdout goes to the terminal as well.

No stream ends the program: a full, closed or unread one drops what is written to it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO, cast

from parallelrun.base.errors import EnvironmentProblem, Problem

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07|\r(?=\n)")


def log_path(directory: Path, rank: int) -> Path:
    return directory / "logs" / f"rank_{rank}.log"


def open_log(directory: Path, rank: int) -> int:
    """Return a descriptor that appends to a rank's log."""
    return os.open(log_path(directory, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


class Output:
    """A text stream that drops what it cannot write (full disk, closed terminal, `| head`). error: the first one."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self.error: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        """Return the stream's attribute (`fileno`, `encoding`, `isatty`, ...)."""
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, action: Callable[[], object]) -> None:
        try:
            action()
        except OSError as error:
            self.error = self.error or error


class Screen(Output):
    """The terminal, with a plain copy in the log."""

    def __init__(self, terminal: TextIO, log: TextIO):
        terminal.fileno()  # raises if there is no terminal
        super().__init__(terminal)
        self._log = log

    def write(self, text: str) -> int:
        self._log.write(_CONTROL.sub("", text).replace("\r", "\n"))
        return super().write(text)

    def flush(self) -> None:
        self._log.flush()
        super().flush()


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Make `sys.stdout` an Output. At the end, raise EnvironmentProblem if writing failed, except to a closed pipe."""
    before = sys.stdout
    output = Output(before)
    sys.stdout = cast(TextIO, output)
    try:
        yield
        output.flush()
    finally:
        sys.stdout = before
        if output.error is not None:  # Python flushes the stream's buffer at exit: let that succeed
            with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as null:
                os.dup2(null.fileno(), before.fileno())
    if output.error is not None and not isinstance(output.error, (BrokenPipeError, ConnectionResetError)):
        message = f"standard output cannot be written to: {output.error.strerror or output.error}"
        raise EnvironmentProblem(Problem(message, "standard output"))


def redirect(directory: Path, rank: int) -> None:
    """Send this process's output to its log permanently; rank 0's stdout goes to the terminal, too.

    faulthandler writes crashes, and on SIGUSR1 the stacks of all threads, to the log.
    """
    log = open_log(directory, rank)
    os.dup2(log, 2)
    sys.stderr = _text_log(2)
    if rank == 0:
        terminal = open(1, "w", buffering=1, closefd=False, errors="replace")  # noqa: SIM115
        sys.stdout = cast(TextIO, Screen(terminal, sys.stderr))
    else:
        os.dup2(log, 1)
        sys.stdout = _text_log(1)
    os.close(log)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    faulthandler.enable(file=2, all_threads=True)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True, chain=True)


@contextlib.contextmanager
def copied(directory: Path, rank: int) -> Iterator[TextIO]:
    """While a worker runs inline: copy stdout to its log, and send stderr (warnings, tracebacks) only to the log."""
    descriptor = open_log(directory, rank)
    before = sys.stdout
    try:
        log = _text_log(descriptor)
        with contextlib.suppress(OSError, ValueError, AttributeError):  # a caller may have replaced stdout
            sys.stdout = cast(TextIO, Screen(before, log))
        with contextlib.redirect_stderr(log):
            yield log
    finally:
        with contextlib.suppress(ValueError):
            sys.stdout.flush()
        sys.stdout = before
        log.flush()
        os.close(descriptor)


def _text_log(descriptor: int) -> TextIO:
    return cast(TextIO, Output(open(descriptor, "w", buffering=1, closefd=False, errors="backslashreplace")))
