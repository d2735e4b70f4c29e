"""A standard output that may be full, closed or no longer read, without ending the program. No torch."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast

from parallelrun.errors import EnvironmentProblem, Problem


class Output:
    """A stream that records the first error of writing to it, and drops everything that is written afterwards."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self.error: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write `text`, or drop it."""
        if self.error is None:
            try:
                return self._stream.write(text)
            except OSError as error:
                self._drop(error)
        return len(text)

    def flush(self) -> None:
        """Flush, or drop the buffered text."""
        if self.error is None:
            try:
                self._stream.flush()
            except OSError as error:
                self._drop(error)

    def _drop(self, error: OSError) -> None:
        """Record `error`, and send the stream's buffer, which Python flushes at exit, to /dev/null."""
        self.error = error
        with contextlib.suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Make `sys.stdout` an Output. At the end, raise EnvironmentProblem if writing failed, except to a closed pipe."""
    before = sys.stdout
    # if the shell closed it (`>&-`), this file takes the lowest free number, so that nothing else becomes stdout
    stream = before if before is not None else open(os.devnull, "w")  # noqa: SIM115
    output = Output(stream)
    sys.stdout = cast(TextIO, output)
    try:
        yield
        output.flush()
    finally:
        sys.stdout = before
    if output.error is not None and not isinstance(output.error, (BrokenPipeError, ConnectionResetError)):
        what = f"standard output cannot be written to: {output.error.strerror or output.error}"
        raise EnvironmentProblem(Problem(what, "standard output"))
