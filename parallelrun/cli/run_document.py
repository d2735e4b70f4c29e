"""`run|verify|bench --json`: one JSON document on stdout; what people read meanwhile goes to stderr. No torch."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_RESULT = {"run": "summary", "verify": "verify", "bench": "bench"}  # verb -> the file that holds what came out


@contextlib.contextmanager
def screen_on_stderr() -> Iterator[None]:
    """While entered, this process and those it starts write their screens to stderr."""
    sys.stdout.flush()
    kept = None
    with contextlib.suppress(OSError, ValueError):  # a caller may have put something without a descriptor there
        number = sys.stdout.fileno()
        kept = os.dup(number)
        os.dup2(sys.stderr.fileno(), number)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        if kept is not None:
            os.dup2(kept, number)
            os.close(kept)


def document(verb: str, exit_code: int, directory: Path | None) -> dict[str, Any]:
    """What a run left: its exit code, its directory, `status.json`, and what its verb writes (null where missing)."""
    name = _RESULT[verb]
    return {
        "verb": verb,
        "exit_code": exit_code,
        "directory": str(directory) if directory else None,
        "status": _read(directory, "status"),
        name: _read(directory, name),
    }


def _read(directory: Path | None, name: str) -> Any:
    try:
        return json.loads((directory / f"{name}.json").read_text()) if directory else None
    except (OSError, ValueError):
        return None
