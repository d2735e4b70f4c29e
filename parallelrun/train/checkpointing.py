"""Saves and resumes a training: when it saves, which values it saves beside the tensors, and how a save may fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from parallelrun.checkpoint import store
from parallelrun.checkpoint.find import FOLDER, keep_last
from parallelrun.checkpoint.resume import check_global_batch, keeps_last_state, resolve_resume
from parallelrun.config.schema import Config
from parallelrun.context import WorkerContext
from parallelrun.errors import SaveFailed
from parallelrun.train.build import Training
from parallelrun.train.schedules import LossScaler

MAX_FAILED_SAVES = 2  # in a row, then the training stops: it would be lost


class Checkpoints:
    """The checkpoints of one run. All ranks make the same decisions."""

    def __init__(self, training: Training, scaler: LossScaler, context: WorkerContext):
        self._training, self._scaler, self._context = training, scaler, context
        self._resumed: dict[str, Any] = {}  # `extra` of the checkpoint from which this run resumed
        self._failed_steps: list[int] = []
        self._failed_in_a_row = 0

    def resume(self) -> int:
        """Load `config.resume` if given; return its step, else 0. Raises CheckpointError."""
        self._resumed = load(self._training, self._scaler)
        return int(self._resumed["step"]) if self._resumed else 0

    def after_step(self, step: int, stopping: bool) -> None:
        """Save if it is due. If a periodic save fails, print a warning and try again at the next one.

        Raises SaveFailed if the run ends with this step, and for the second failure in a row.
        """
        config = self._training.config
        if not due(config, step, stopping):
            return
        self._context.heartbeat(step, "save")
        try:
            save(self._training, self._scaler, step, self._context.directory)
        except SaveFailed as error:
            self._failed_steps.append(step)
            self._failed_in_a_row += 1
            self._context.save_failed(step)
            if stopping or step >= config.steps or self._failed_in_a_row == MAX_FAILED_SAVES:
                raise
            if self._context.console_owner:
                print(f"warning: {error}; training goes on, the next save is {_next_save(config, step)}", flush=True)
        else:
            self._failed_in_a_row = 0

    def facts(self) -> dict[str, Any]:
        """Return the fields of summary.json about saving and resuming."""
        before, now = self._resumed.get("dataset"), self._training.dataset.fingerprint
        return {
            "failed_saves": len(self._failed_steps),
            "failed_save_step": self._failed_steps[-1] if self._failed_steps else None,
            "resumed_step": self._resumed.get("step"),
            "resumed_dataset_sha256": before["fingerprint"] if before else None,
            "dataset_changed": before["fingerprint"] != now if before else None,
        }


def due(config: Config, step: int, stopping: bool) -> bool:
    """Return whether the run saves after this step: periodically, when it stops, and after the last step."""
    if stopping:
        return True
    every = config.checkpoint.every
    return (every > 0 and step % every == 0) or (step == config.steps and keeps_last_state(config))


def _next_save(config: Config, step: int) -> str:
    later = next((one for one in range(step + 1, config.steps + 1) if due(config, one, False)), None)
    return f"at step {later}" if later else "only if the run is asked to stop"


def save(training: Training, scaler: LossScaler, step: int, run_directory: Path) -> None:
    """Write `checkpoints/step_<n>` of the run and delete the ones beyond `checkpoint.keep`. Raises SaveFailed."""
    config, plan = training.config, training.plan
    extra = {
        "step": step,
        "samples": step * plan.batch.global_batch,
        "global_batch": plan.batch.global_batch,
        "seed": config.seed,
        "dataset": training.dataset.record,
        "scaler": scaler.state(),
        "kept": sorted(training.data.kept),
    }
    directory = run_directory / FOLDER
    kept = training.data.kept
    store.save(directory, step, training.held, training.optimizer, extra, plan, training.mesh, kept)
    keep_last(directory, config.checkpoint.keep, training.mesh.rank)


def load(training: Training, scaler: LossScaler) -> dict[str, Any]:
    """Load `config.resume` if given; return its `extra`, else nothing. Raises CheckpointError."""
    config, plan = training.config, training.plan
    if not config.resume:
        return {}
    path = resolve_resume(config.resume, config.runs)
    extra = store.load(path, training.held, training.optimizer, plan, training.mesh, training.data.kept)
    training.data.finish_update()  # zero1: gather the loaded shards into the weights
    training.data.after_load(extra.get("kept", ()))
    check_global_batch(extra, plan, path)
    scaler.load_state(extra["scaler"])
    return extra
