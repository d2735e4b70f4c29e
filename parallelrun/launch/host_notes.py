"""What the agent of a host (`cli/host_agent.py`) and its ranks tell each other: where the run is, which host is lost.

An anonymous file that the ranks inherit, because a rank that is told may wait in native code: its watchdog reads it.
Torch-free.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parallelrun.launch.environment import NOTES
from parallelrun.launch.heartbeat import anonymous_file
from parallelrun.launch.host_failures import LostHost

_RUN, _LOST = range(2)  # the pages of the file
_PAGE = 16_384  # bytes


class HostNotes:
    """The notes of one start of a host's ranks. descriptor: inherited; None for new notes."""

    def __init__(self, descriptor: int | None = None):
        self.descriptor = anonymous_file("notes", 2 * _PAGE) if descriptor is None else descriptor

    @classmethod
    def inherited(cls, environ: Mapping[str, str]) -> HostNotes | None:
        """Return the notes that this rank has from its agent; None under other launchers."""
        return cls(int(environ[NOTES])) if environ.get(NOTES) else None

    @property
    def run(self) -> Path | None:
        """The run directory, once a rank has told it."""
        found = self._read(_RUN)
        return Path(found) if found else None

    def set_run(self, directory: Path) -> None:
        """As a rank: tell the run directory."""
        self._write(_RUN, os.fspath(directory))

    @property
    def lost(self) -> LostHost | None:
        """The host to which the launcher has lost the connection, once the agent has told it."""
        found = self._read(_LOST)
        return LostHost(**found) if found else None

    def set_lost(self, fields: Mapping[str, Any]) -> None:
        """As the agent: tell the fields of the `LostHost`."""
        self._write(_LOST, fields)

    def close(self) -> None:
        """Release the notes, when no rank is left."""
        os.close(self.descriptor)

    def _read(self, page: int) -> Any:
        with contextlib.suppress(ValueError):  # empty, or not written to its end
            return json.loads(os.pread(self.descriptor, _PAGE, page * _PAGE).rstrip(b"\0"))
        return None

    def _write(self, page: int, content: Any) -> None:
        os.pwrite(self.descriptor, json.dumps(content).encode()[:_PAGE], page * _PAGE)
