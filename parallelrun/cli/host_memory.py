"""The folder for checkpoints in the memory of a host, which its agent keeps between the attempts of a run."""

from __future__ import annotations

import contextlib
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from parallelrun.launch.environment import MEMORY


class AgentMemory(contextlib.ExitStack):
    """The folder lasts as long as this context. Its imports are late: the agent's greeting need not wait for them."""

    _folder: Path | None = None

    def open(self, wanted: bool) -> None:
        """Create the folder if the run keeps checkpoints in memory. Call it before threads are started."""
        from parallelrun.launch.memory_folder import memory_folder

        self._folder = self.enter_context(memory_folder(wanted))

    def variables(self) -> dict[str, str]:
        """Return the variables by which the ranks know the folder."""
        return {MEMORY: os.fspath(self._folder)} if self._folder else {}

    def keep(self, found: tuple[int, str] | None) -> None:
        """Remove all checkpoints but that of `(step, index)`. If this fails, the ranks cannot load it, and the next
        attempt goes on from the disk."""
        from parallelrun.checkpoint.held import keep_only, remove_all

        if self._folder is not None:
            with contextlib.suppress(OSError):
                keep_only(self._folder, *found) if found else remove_all(self._folder)

    def copy(self, step: int, target: str) -> str:
        """Copy the files of a checkpoint that are not there yet to the disk. Return an error, or an empty text."""
        from parallelrun.checkpoint.held import copy_to

        try:
            if self._folder is not None:
                copy_to(self._folder, step, Path(target))
        except OSError as error:
            return str(error)
        return ""

    def held(self) -> dict[int, dict[str, Any]]:
        """Return which files of which checkpoints the folder holds, as `checkpoint.held.held`."""
        from parallelrun.checkpoint.held import held

        return {step: asdict(one) for step, one in held(self._folder).items()} if self._folder else {}
