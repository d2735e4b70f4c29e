"""Saves and resumes a training: when it saves, which values it saves beside the tensors, and how a save may fail."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
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
from parallelrun.planner.contract.plan import WORLD
from parallelrun.training.loop.build import Training
from parallelrun.training.loop.schedules import LossScaler

MAX_FAILED_SAVES = 2  # in a row, then the training stops: it would be lost


class Checkpoints:
    """The checkpoints of one run. All ranks make the same decisions. scaler: whose state is saved.

    A periodic save is written beside training (`checkpoint.asynchronous`), at most one at a time. The last save, and
    that of a run that is asked to stop, wait for the disk.
    """

    def __init__(self, training: Training, scaler: LossScaler, context: WorkerContext):
        self._training, self._scaler, self._context = training, scaler, context
        self._resumed: dict[str, Any] = {}  # `extra` of the checkpoint from which this run resumed
        self._failed_steps: list[int] = []
        self._failed_in_a_row = 0
        self.times = SaveTimes()
        self._fatal: BaseException | None = None  # the outcome of a save beside training that ends the run
        self._pending_step, self._start = 0, 0  # start: the last step before this run
        config = training.config
        writer = BackgroundWriter(training.plan, training.mesh.group(WORLD), training.mesh.device, config.timeout_s)
        self._beside = writer if config.checkpoint.asynchronous else None

    def resume(self) -> int:
        """Load `config.resume` if given; return its step, else 0. Raises CheckpointError."""
        self._resumed = load(self._training, self._scaler)
        self._start = int(self._resumed["step"]) if self._resumed else 0
        return self._start

    def have_failed(self) -> bool:
        """Look at the save beside training, without waiting. Return whether this rank knows that the run must end.

        The ranks may learn it at different steps. They agree on the step as for any request to stop; `after_step` then
        raises what has happened.
        """
        if self._beside and self._beside.is_done:
            self._collect()
        return self._fatal is not None

    def after_step(self, step: int, stopping: bool) -> None:
        """Save if it is due. If a periodic save fails, print a warning and try again at the next one.

        Raises SaveFailed if the run ends with this step, and for the second failure in a row; and any other error of a
        save beside training.
        """
        config = self._training.config
        is_due, is_last = due(config, step, stopping), stopping or step >= config.steps
        if self._beside and step == self._start + 1 and config.checkpoint.every > 1 and not is_last:
            self._beside.prepare(store.parts_of(self._training.state))
        if not is_due and not is_last:
            return
        began = time.perf_counter()
        self._context.heartbeat(step, "save")
        self.finish()
        if not is_due:
            return
        if self._beside and not is_last:
            directory = self._context.directory / FOLDER
            extra = _extra(self._training, self._scaler, step)
            self._beside.start(store.parts_of(self._training.state), directory, step, extra, config.checkpoint.keep)
            self._pending_step = step
        else:
            self._write(step, is_last)
        self.times.paused.append(time.perf_counter() - began)

    def before_update(self, training: Training) -> None:
        """Wait until the weights and the state may change. Called in every step, when the gradients are final."""
        if self._beside and self._beside.is_pending:
            began = time.perf_counter()
            self._beside.wait_for_copies()
            self.times.paused[-1] += time.perf_counter() - began

    def finish(self) -> None:
        """Wait for the save beside training, if there is one, and raise the error with which the run must end."""
        if self._beside and self._beside.is_pending:
            self._collect()
        if self._fatal is not None:
            raise self._fatal

    def _write(self, step: int, is_last: bool) -> None:
        """Save while training waits."""
        began = time.perf_counter()
        try:
            save(self._training, self._scaler, step, self._context.directory)
        except SaveFailed as error:
            if self._failed(step, error) or is_last:
                raise
            self._warn(error)
        else:
            self._saved(time.perf_counter() - began)

    def _collect(self) -> None:
        assert self._beside is not None
        try:
            self._beside.collect()
        except SaveFailed as error:
            if self._failed(self._pending_step, error):
                self._fatal = error
            else:
                self._warn(error)
        except BaseException as error:
            self._fatal = error
        else:
            self._saved(self._beside.seconds)

    def _saved(self, seconds: float) -> None:
        self._failed_in_a_row = 0
        self.times.written.append(seconds)

    def _failed(self, step: int, error: SaveFailed) -> bool:
        """Record a failed save; return whether it was one too many."""
        self._failed_steps.append(step)
        self._failed_in_a_row += 1
        self._context.save_failed(step)
        return self._failed_in_a_row == MAX_FAILED_SAVES

    def _warn(self, error: SaveFailed) -> None:
        if self._context.console_owner:
            following = _next_save(self._training.config, self._failed_steps[-1])
            print(f"warning: {error}; training goes on, the next save is {following}", flush=True)

    def facts(self) -> dict[str, Any]:
        """Return the fields of summary.json about saving and resuming."""
        before = self._resumed.get("dataset")
        return {
            **self.times.facts(),
            "failed_saves": len(self._failed_steps),
            "failed_save_step": self._failed_steps[-1] if self._failed_steps else None,
            "resumed_step": self._resumed.get("step"),
            "resumed_dataset_sha256": before["fingerprint"] if before else None,
            "dataset_changed": bool(data_changes(self._resumed, self._training.dataset)) if before else None,
        }


@dataclass
class SaveTimes:
    """Seconds of each save: paused, that training stood still; written, until it was complete on the disk."""

    paused: list[float] = field(default_factory=list)
    written: list[float] = field(default_factory=list)

    def facts(self) -> dict[str, Any]:
        """Return the fields of summary.json."""
        return {
            "saves": len(self.written),
            "save_pause_median_s": statistics.median(self.paused) if self.paused else None,
            "save_pause_max_s": max(self.paused, default=None),
            "save_write_median_s": statistics.median(self.written) if self.written else None,
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
    """Return the values that an exact resume needs beside the tensors."""
    config, plan = training.config, training.plan
    return {
        "step": step,
        "samples": step * plan.batch.global_batch,
        "global_batch": plan.batch.global_batch,
        "seed": config.seed,
        "dataset": training.dataset.record,
        "scaler": scaler.state(),
        "kept": sorted(training.data.kept),
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
