"""A standard output that may be full, closed or no longer read, without ending the program. No torch."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TextIO, cast

from parallelrun.errors import EnvironmentProblem, Problem
from parallelrun.launch.output import Output


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
