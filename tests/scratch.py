"""Folders of one process for files that several of its tests read. A copy of the process has its own."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

_folders: dict[tuple[str, int], tempfile.TemporaryDirectory[str]] = {}


def scratch(prefix: str) -> Path:
    """The folder of this process. It is removed when the process ends, or by `remove`."""
    key = prefix, os.getpid()
    if key not in _folders:
        _folders[key] = tempfile.TemporaryDirectory(prefix=prefix)
    return Path(_folders[key].name)


def remove() -> None:
    """Remove what this process has made, and not what the process has that it is a copy of."""
    for (_, process), folder in _folders.items():
        if process == os.getpid():
            folder.cleanup()
