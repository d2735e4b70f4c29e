"""The checkpoints of one server, written concurrently with serving where `checkpoint.asynchronous` asks for it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial

import torch

from parallelrun.base.context import WorkerContext
from parallelrun.checkpoint.background import BackgroundWriter
from parallelrun.checkpoint.find import FOLDER
from parallelrun.checkpoint.store import write_parts
from parallelrun.config.schema.run_schema import Config
from parallelrun.distributed.mesh import Group
from parallelrun.planner.contract.plan import Plan
from parallelrun.training.loop.saves import Saves

from .store import ShardStore


class ServerCheckpoints:
    """Saves the shards of one server, together with the other servers, which decide identically.

    Collective over the servers. All calls but the first are made under the server's lock. times: paused, that workers
    waited for the servers.
    """

    def __init__(self, config: Config, plan: Plan, context: WorkerContext, store: ShardStore, group: Group):
        self._config, self._plan, self._context, self._store, self._group = config, plan, context, store, group
        background = None
        if config.checkpoint.asynchronous and config.checkpoint.every:
            background = BackgroundWriter(plan, group, torch.device("cpu"), config.timeout_s)
            background.join()
        self._saves = Saves(context, background)
        self.times, self.before_update = self._saves.times, self._saves.before_update
        self._num_told = 0  # of the saves that have failed, how many the workers know of

    def save(self, clocks: Mapping[int, int], final: bool) -> int:
        """Save `checkpoints/step_<lowest clock>`, in the background unless it is the final one.

        clocks: of the live workers, which all wait at a barrier. Return the step of a save that has failed and of which
        the workers do not know yet, else 0. Raises SaveFailed for the last chance to save, and for the second failure
        in a row.
        """
        began, step, folder = time.perf_counter(), min(clocks.values()), self._context.directory / FOLDER
        self._context.heartbeat(step, "save")
        self._saves.collect()
        parts, extra, keep = self._store.parts(), self._store.extra(clocks), self._config.checkpoint.keep
        if self._saves.background and not final:
            self._saves.start(step, parts, extra, keep)
        else:
            group, alone = self._group.process_group, self._group.size == 1
            write = partial(write_parts, folder, step, parts, extra, self._plan, keep=keep, group=group, alone=alone)
            self._saves.write(step, write, final)
        self.times.paused.append(time.perf_counter() - began)
        return self._new_failed_step()

    def poll(self) -> None:
        """Record how the save in the background has ended, if it has. Raises its error if the run must end."""
        self._saves.collect(wait=False)

    def finish(self) -> int:
        """Wait for the save in the background. Return the step of a save that has failed, as `save` does."""
        self._saves.collect()
        return self._new_failed_step()

    def _new_failed_step(self) -> int:
        new, self._num_told = self._saves.failed_steps[self._num_told :], len(self._saves.failed_steps)
        return new[-1] if new else 0
