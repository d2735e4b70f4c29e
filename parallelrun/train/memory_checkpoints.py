"""Checkpoints in the memory of the host (`checkpoint.memory_every`), from which the launcher restarts lost ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from parallelrun.checkpoint.background import BackgroundWriter
from parallelrun.checkpoint.planners import LocalPart
from parallelrun.context import WorkerContext
from parallelrun.errors import SaveFailed
from parallelrun.plan.structure import WORLD
from parallelrun.train.build import Training

_KEPT = 1  # the one before it is deleted when the newest is complete


class MemoryCheckpoints:
    """Writes them beside training, at most one at a time. All ranks make the same decisions."""

    def __init__(self, training: Training, context: WorkerContext):
        mesh = training.mesh
        self._every = training.config.checkpoint.memory_every if context.memory is not None else 0
        self._context = context
        self._writer = BackgroundWriter(training.plan, mesh.group(WORLD), mesh.device, training.config.timeout_s)
        self.num_saved = 0

    def after_step(
        self, step: int, parts: Callable[[], Sequence[LocalPart]], extra: Callable[[], dict[str, Any]]
    ) -> None:
        """Begin to save if it is due. Collective. If the memory is too small, print a warning once and save no more."""
        if not self._every or step % self._every:
            return
        self.finish()
        if self._every:
            assert self._context.memory is not None
            self._writer.start(parts(), self._context.memory, step, extra(), _KEPT)

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
