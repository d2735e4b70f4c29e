"""Checkpoints in the memory of hosts (`checkpoint.memory_every`), from which the launcher restarts lost ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from parallelrun.checkpoint import memory
from parallelrun.checkpoint.background import BackgroundWriter
from parallelrun.checkpoint.index import Index
from parallelrun.checkpoint.memory import MemoryHosts
from parallelrun.checkpoint.planners import LocalPart
from parallelrun.checkpoint.store import parts_wanted
from parallelrun.context import WorkerContext
from parallelrun.errors import SaveFailed
from parallelrun.plan.structure import WORLD
from parallelrun.train.build import Training


class MemoryCheckpoints:
    """Writes them beside training, at most one at a time. All ranks make the same decisions."""

    def __init__(self, training: Training, context: WorkerContext):
        mesh = training.mesh
        self._training, self._context = training, context
        self._every = training.config.checkpoint.memory_every if context.memory is not None else 0
        self._hosts = MemoryHosts.of(context.memory, mesh) if self._every and context.memory is not None else None
        self._writer = BackgroundWriter(training.plan, mesh.group(WORLD), mesh.device, training.config.timeout_s)
        self.num_saved = 0

    def fetch(self, path: Path) -> list[str] | None:
        """Get what this host's ranks need of `path`, a checkpoint in the memory of several hosts. Collective.

        Return the files that this rank must check; None if one host, or a disk, has all. Raises CheckpointError.
        """
        training, group = self._training, self._writer.join() if self._hosts else None
        if self._hosts is None or group is None or path.parent != self._hosts.folder:
            return None

        def parts(index: Index) -> Sequence[LocalPart]:
            return parts_wanted(index, training.held, training.plan, training.mesh, training.data.kept)[0]

        return memory.fetch(path, self._hosts, parts, training.plan, training.mesh, group)

    def after_step(
        self, step: int, parts: Callable[[], Sequence[LocalPart]], extra: Callable[[], dict[str, Any]]
    ) -> None:
        """Begin to save if it is due. Collective. If the memory is too small, print a warning once and save no more."""
        if not self._every or step % self._every:
            return
        self.finish()
        if self._every:
            assert self._hosts is not None
            write = partial(memory.write, self._hosts, step, extra(), self._training.plan)
            self._writer.start_with(parts(), write)

    def before_update(self) -> None:
        """Wait until the weights and the state may change."""
        self._writer.wait_for_copies()

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, and raise its error unless there was too little memory."""
        if not self._writer.is_pending:
            return
        try:
            self._writer.collect()
        except SaveFailed as error:
            self._every = 0
            if self._context.console_owner:
                print(f"warning: {error}; no more checkpoints are kept in memory", flush=True)
        else:
            self.num_saved += 1
