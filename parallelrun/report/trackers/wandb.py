"""Weights & Biases: offline, in `<run>/wandb`, unless the user sets WANDB_MODE."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from parallelrun.report.trackers import FINISHED, INTERRUPTED, TrackedRun, Tracker

OFFLINE = "offline"


class WandbTracker(Tracker):
    """One run of W&B. The run that continues it has the same id; `wandb sync` then joins their files.

    Nothing but what is logged here is recorded: no machine, program, packages, git state or console, and no reports of
    errors to W&B.
    """

    library, extra = "wandb", "trackers"

    def __init__(self, run: TrackedRun):
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        self._wandb: Any = import_module("wandb")

        quiet = self._wandb.Settings(
            console="off", silent=True, disable_git=True, disable_code=True, disable_job_creation=True,
            x_disable_stats=True, x_disable_meta=True, x_disable_machine_info=True, x_save_requirements=False,
        )  # fmt: skip
        self._run = self._wandb.init(
            id=run.identity["id"] if run.identity else None, resume="allow",
            mode=os.environ.get("WANDB_MODE") or OFFLINE,
            dir=str(run.directory), project=run.project, name=run.name, group=run.group, tags=run.tags,
            settings=quiet,
        )  # fmt: skip
        self._run.config.update({**run.config, "plan": dict(run.plan)}, allow_val_change=True)

    @property
    def identity(self) -> Mapping[str, Any]:
        return {"id": self._run.id}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def finish(self, state: str, summary: Mapping[str, Any]) -> None:
        self._run.summary.update({**summary, "state": state})
        if state == INTERRUPTED:
            self._run.mark_preempting()
        self._run.finish(exit_code=0 if state == FINISHED else summary.get("exit_code") or 1)
        self._wandb.teardown()  # `finish` may return before the file is written


TRACKER = WandbTracker
