"""Standard output that may be full, closed or no longer read, without ending what the program does. No torch."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast

from parallelrun.errors import EnvironmentProblem, Problem

_GONE = (BrokenPipeError, ConnectionResetError)  # the reader has seen enough: no error


class Output:
    """A stream that keeps the first error of writing to it, and drops what is written after that."""

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
        """Flush, or drop what is left."""
        if self.error is None:
            try:
                self._stream.flush()
            except OSError as error:
                self._drop(error)

    def _drop(self, error: OSError) -> None:
        """Keep `error`; what the stream still buffers, and what Python flushes at its end, goes to /dev/null."""
        self.error = error
        with contextlib.suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """While entered, `sys.stdout` is an Output. Raises EnvironmentProblem at the end if it could not be written to for
    another reason than a reader who has gone."""
    before = sys.stdout
    # closed by the shell (`>&-`): the file takes the lowest free number, so that nothing else becomes stdout
    stream = before if before is not None else open(os.devnull, "w")  # noqa: SIM115
    output = Output(stream)
    sys.stdout = cast(TextIO, output)
    try:
        yield
        output.flush()
    finally:
        sys.stdout = before
    if output.error is not None and not isinstance(output.error, _GONE):
        what = f"standard output cannot be written to: {output.error.strerror or output.error}"
        raise EnvironmentProblem(Problem(what, "standard output"))
