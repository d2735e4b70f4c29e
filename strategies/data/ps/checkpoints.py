"""The checkpoints of one server, written beside serving where `checkpoint.asynchronous` asks for it."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch

from parallelrun.base.context import WorkerContext
from parallelrun.base.errors import SaveFailed
from parallelrun.checkpoint.background import BackgroundWriter
from parallelrun.checkpoint.find import FOLDER
from parallelrun.checkpoint.store import write_parts
from parallelrun.config.schema.run_schema import Config
from parallelrun.distributed.mesh import Group
from parallelrun.planner.contract.plan import Plan
from parallelrun.training.loop.checkpointing import MAX_FAILED_SAVES, SaveTimes

from .store import ShardStore


class ServerCheckpoints:
    """Saves the shards of one server, together with the other servers, which decide alike. Collective over them.

    All calls but the first are made under the server's lock. times: paused, that workers waited for the servers.
    """

    def __init__(self, config: Config, plan: Plan, context: WorkerContext, store: ShardStore, group: Group):
        self._config, self._plan, self._context, self._store, self._group = config, plan, context, store, group
        self.times = SaveTimes()
        self._step = 0  # of the save beside serving
        self._failed_step = 0  # of a save that has failed, until the workers are told
        self._failed_in_a_row = 0
        self._beside: BackgroundWriter | None = None
        self._is_prepared = False
        if config.checkpoint.asynchronous and config.checkpoint.every:
            self._beside = BackgroundWriter(plan, group, torch.device("cpu"), config.timeout_s)
            self._beside.join()

    def save(self, clocks: Mapping[int, int], final: bool) -> int:
        """Save `checkpoints/step_<lowest clock>`, beside serving unless it is the final one.

        clocks: of the live workers, which all wait at a barrier. Return the step of a save that has failed and of which
        the workers do not know yet, else 0. Raises SaveFailed for the last chance to save, and for the second failure
        in a row.
        """
        began, step, folder = time.perf_counter(), min(clocks.values()), self._context.directory / FOLDER
        self._context.heartbeat(step, "save")
        self._collect()
        parts, extra, keep = self._store.parts(), self._store.extra(clocks), self._config.checkpoint.keep
        if self._beside and not final:
            self._beside.start(parts, folder, step, extra, keep)
            self._step = step
        else:
            group, alone = self._group.process_group, self._group.size == 1
            try:
                write_parts(folder, step, parts, extra, self._plan, keep=keep, group=group, alone=alone)
            except SaveFailed:
                self._failed(step, final)
            else:
                self._saved(time.perf_counter() - began)
        self.times.paused.append(time.perf_counter() - began)
        return self._news()

    def before_update(self) -> None:
        """Wait until the shards may change."""
        if self._beside and self._beside.is_pending:
            began = time.perf_counter()
            self._beside.wait_for_copies()
            self.times.paused[-1] += time.perf_counter() - began

    def after_update(self) -> None:
        """After the first update, obtain the memory for copies: the optimizer's state exists now."""
        if self._beside and not self._is_prepared:
            self._is_prepared = True
            self._beside.prepare(self._store.parts())

    def look(self) -> None:
        """Learn how the save beside serving has ended, if it has. Raises its error if the run must end."""
        if self._beside and self._beside.is_done:
            self._collect()

    def finish(self) -> int:
        """Wait for the save beside serving. Return the step of a save that has failed, as `save` does."""
        self._collect()
        return self._news()

    def _collect(self) -> None:
        if self._beside is None or not self._beside.is_pending:
            return
        try:
            self._beside.collect()
        except SaveFailed:
            self._failed(self._step, False)
        else:
            self._saved(self._beside.seconds)

    def _news(self) -> int:
        failed, self._failed_step = self._failed_step, 0
        return failed

    def _saved(self, seconds: float) -> None:
        self._failed_in_a_row = 0
        self.times.written.append(seconds)

    def _failed(self, step: int, final: bool) -> None:
        """Record a save that has failed. Call it while its error is handled: if the run must end, it is raised."""
        self._failed_in_a_row += 1
        self._failed_step = step
        self._context.save_failed(step)
        if final or self._failed_in_a_row == MAX_FAILED_SAVES:
            raise
