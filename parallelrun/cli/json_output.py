"""`--json`: one document on stdout, and everything else on stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from typing import Any

_INDENTED = 2**16  # characters; longer JSON is not indented: Python does it ten times slower, and nobody reads it


def print_json(fields: dict[str, Any]) -> None:
    """Print one JSON document, with `schema` and without NaN."""
    from parallelrun.base.records import document

    plain = document(fields)
    text = json.dumps(plain, allow_nan=False)
    if len(text) < _INDENTED:
        text = json.dumps(plain, allow_nan=False, indent=2)
    sys.stdout.write(text + "\n")


@contextmanager
def screen_on_stderr() -> Iterator[None]:
    """Let this process and its children print to stderr, so that stdout holds the JSON document only."""
    sys.stdout.flush()
    saved = None
    with suppress(OSError, ValueError):  # a caller may have replaced stdout by a stream without a descriptor
        number = sys.stdout.fileno()
        saved = os.dup(number)
        os.dup2(sys.stderr.fileno(), number)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        if saved is not None:
            os.dup2(saved, number)
            os.close(saved)
