"""The checkpoints of one server, written concurrently with serving where `checkpoint.asynchronous` asks for it."""

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
    """Saves the shards of one server, together with the other servers, which decide identically.

    Collective over the servers. All calls but the first are made under the server's lock. times: paused, that workers
    waited for the servers.
    """

    def __init__(self, config: Config, plan: Plan, context: WorkerContext, store: ShardStore, group: Group):
        self._config, self._plan, self._context, self._store, self._group = config, plan, context, store, group
        self.times = SaveTimes()
        self._step = 0  # of the save in the background
        self._failed_step = 0  # of a save that has failed, until the workers are told
        self._failed_in_a_row = 0
        self._background: BackgroundWriter | None = None
        if config.checkpoint.asynchronous and config.checkpoint.every:
            self._background = BackgroundWriter(plan, group, torch.device("cpu"), config.timeout_s)
            self._background.join()

    def save(self, clocks: Mapping[int, int], final: bool) -> int:
        """Save `checkpoints/step_<lowest clock>`, in the background unless it is the final one.

        clocks: of the live workers, which all wait at a barrier. Return the step of a save that has failed and of which
        the workers do not know yet, else 0. Raises SaveFailed for the last chance to save, and for the second failure
        in a row.
        """
        began, step, folder = time.perf_counter(), min(clocks.values()), self._context.directory / FOLDER
        self._context.heartbeat(step, "save")
        self._collect()
        parts, extra, keep = self._store.parts(), self._store.extra(clocks), self._config.checkpoint.keep
        if self._background and not final:
            self._background.start(parts, folder, step, extra, keep)
            self._step = step
        else:
            group, alone = self._group.process_group, self._group.size == 1
            try:
                write_parts(folder, step, parts, extra, self._plan, keep=keep, group=group, alone=alone)
            except SaveFailed:
                self._fail(step, final)
            else:
                self._succeed(time.perf_counter() - began)
        self.times.paused.append(time.perf_counter() - began)
        return self._pop_failed_step()

    def before_update(self) -> None:
        """Wait until the shards may change."""
        if self._background and self._background.is_pending:
            began = time.perf_counter()
            self._background.wait_for_copies()
            self.times.paused[-1] += time.perf_counter() - began

    def poll(self) -> None:
        """Record how the save in the background has ended, if it has. Raises its error if the run must end."""
        if self._background and self._background.is_done:
            self._collect()

    def finish(self) -> int:
        """Wait for the save in the background. Return the step of a save that has failed, as `save` does."""
        self._collect()
        return self._pop_failed_step()

    def _collect(self) -> None:
        if self._background is None or not self._background.is_pending:
            return
        try:
            self._background.collect()
        except SaveFailed:
            self._fail(self._step, False)
        else:
            self._succeed(self._background.seconds)

    def _pop_failed_step(self) -> int:
        failed, self._failed_step = self._failed_step, 0
        return failed

    def _succeed(self, seconds: float) -> None:
        self._failed_in_a_row = 0
        self.times.written.append(seconds)

    def _fail(self, step: int, final: bool) -> None:
        """Record a save that has failed. Call it while its error is handled: if the run must end, it is raised."""
        self._failed_in_a_row += 1
        self._failed_step = step
        self._context.save_failed(step)
        if final or self._failed_in_a_row == MAX_FAILED_SAVES:
            raise
