"""Saves and resumes a training: when it saves, which values it saves beside the tensors, and how a save may fail."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from parallelrun.base.context import WorkerContext
from parallelrun.base.errors import EXIT_ENVIRONMENT, SaveFailed
from parallelrun.checkpoint import store
from parallelrun.checkpoint.background import BackgroundWriter
from parallelrun.checkpoint.data import check_data, data_changes
from parallelrun.checkpoint.find import FOLDER
from parallelrun.checkpoint.resume import check_global_batch, keeps_last_state, resolve_resume
from parallelrun.config.schema.run_schema import Config
from parallelrun.planner.contract.plan import WORLD, Plan
from parallelrun.planner.model.definitions import Dataset
from parallelrun.training.loop.build import Training
from parallelrun.training.loop.saves import Saves
from parallelrun.training.loop.schedules import LossScaler


class Checkpoints:
    """The checkpoints of one run. All ranks make the same decisions. scaler: whose state is saved.

    A periodic save is written beside training (`checkpoint.asynchronous`), at most one at a time. The last save, and
    that of a run that is asked to stop, wait for the disk.
    """

    def __init__(self, training: Training, scaler: LossScaler, context: WorkerContext):
        self._training, self._scaler, self._context = training, scaler, context
        self._resumed: dict[str, Any] = {}  # `extra` of the checkpoint from which this run resumed
        self._fatal: BaseException | None = None  # the outcome of a save beside training that ends the run
        config = training.config
        writer = BackgroundWriter(training.plan, training.mesh.group(WORLD), training.mesh.device, config.timeout_s)
        self._saves = Saves(context, writer if config.checkpoint.asynchronous else None)
        self.before_update = self._saves.before_update

    def resume(self) -> int:
        """Load `config.resume` if given; return its step, else 0. Raises CheckpointError."""
        self._resumed = load(self._training, self._scaler)
        return int(self._resumed["step"]) if self._resumed else 0

    def have_failed(self) -> bool:
        """Look at the save beside training, without waiting. Return whether this rank knows that the run must end.

        The ranks may learn it at different steps. They agree on the step as for any request to stop; `after_step` then
        raises what has happened.
        """
        self._collect(wait=False)
        return self._fatal is not None

    def after_step(self, step: int, stopping: bool) -> None:
        """Save if it is due. If a periodic save fails, print a warning and try again at the next one.

        Raises SaveFailed if the run ends with this step, and for the second failure in a row; and any other error of a
        save beside training.
        """
        config, background = self._training.config, self._saves.background
        is_due, is_last = due(config, step, stopping), stopping or step >= config.steps
        if not is_due and not is_last:
            return
        began = time.perf_counter()
        self._context.heartbeat(step, "save")
        self.finish()
        if not is_due:
            return
        if background and not is_last:
            extra = _extra(self._training, self._scaler, step)
            self._saves.start(step, store.parts_of(self._training.state), extra, config.checkpoint.keep)
        else:
            directory = self._context.directory
            failure = self._saves.write(step, lambda: save(self._training, self._scaler, step, directory), is_last)
            self._warn(failure)
        self._saves.times.paused.append(time.perf_counter() - began)

    def finish(self) -> None:
        """Wait for the save beside training, if there is one, and raise the error with which the run must end."""
        self._collect(wait=True)
        if self._fatal is not None:
            raise self._fatal

    def _collect(self, wait: bool) -> None:
        try:
            self._warn(self._saves.collect(wait))
        except BaseException as error:
            self._fatal = error

    def _warn(self, failure: SaveFailed | None) -> None:
        if failure is not None and self._context.console_owner:
            following = _next_save(self._training.config, self._saves.failed_steps[-1])
            print(f"warning: {failure}; training goes on, the next save is {following}", flush=True)

    def facts(self) -> dict[str, Any]:
        """Return the fields of summary.json about saving and resuming."""
        before, failed_steps = self._resumed.get("dataset"), self._saves.failed_steps
        return {
            **self._saves.times.facts(),
            "failed_saves": len(failed_steps),
            "failed_save_step": failed_steps[-1] if failed_steps else None,
            "resumed_step": self._resumed.get("step"),
            "resumed_dataset_sha256": before["fingerprint"] if before else None,
            "dataset_changed": bool(data_changes(self._resumed, self._training.dataset)) if before else None,
        }


def due(config: Config, step: int, stopping: bool) -> bool:
    """Return whether the run saves after this step: periodically, when it stops, and after the last step."""
    if stopping:
        return True
    every = config.checkpoint.every
    return (every > 0 and step % every == 0) or (step == config.steps and keeps_last_state(config))


def _next_save(config: Config, step: int) -> str:
    later = next((following for following in range(step + 1, config.steps + 1) if due(config, following, False)), None)
    return f"at step {later}" if later else "only if the run is asked to stop"


def save(training: Training, scaler: LossScaler, step: int, run_directory: Path) -> None:
    """Write `checkpoints/step_<n>` of the run and delete the ones beyond `checkpoint.keep`. Raises SaveFailed."""
    keep, alone = training.config.checkpoint.keep, training.mesh.shape.num_ranks == 1
    extra = _extra(training, scaler, step)
    store.write_parts(
        run_directory / FOLDER, step, store.parts_of(training.state), extra, training.plan, keep=keep, alone=alone
    )


def _extra(training: Training, scaler: LossScaler, step: int) -> dict[str, Any]:
    values = resume_values(training.config, training.plan, step, training.dataset, scaler)
    return {**values, "kept": sorted(training.data.kept)}


def resume_values(config: Config, plan: Plan, step: int, dataset: Dataset, scaler: LossScaler) -> dict[str, Any]:
    """Return the values that an exact resume needs beside the tensors, under every data strategy."""
    return {
        "step": step,
        "samples": step * plan.batch.global_batch,
        "global_batch": plan.batch.global_batch,
        "seed": config.seed,
        "dataset": dataset.record,
        "scaler": scaler.state(),
    }


def load(training: Training, scaler: LossScaler) -> dict[str, Any]:
    """Load `config.resume` if given; return its `extra`, else nothing. Raises CheckpointError."""
    config, plan = training.config, training.plan
    if not config.resume:
        return {}
    path = resolve_resume(config.resume, config.runs)
    extra = store.load(path, training.state)
    training.data.finish_update()  # zero1: gather the loaded shards into the weights
    training.data.after_load(extra.get("kept", ()))
    check_global_batch(extra, plan, path)
    # The launcher has compared them, so data that differ now have changed during the run. The checkpoint is good: a
    # restart would set it aside after exit code 4.
    check_data(extra, training.dataset, config, path, EXIT_ENVIRONMENT)
    scaler.load_state(extra["scaler"])
    return extra
