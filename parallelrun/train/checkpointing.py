"""When the loop saves, and what goes into a checkpoint beside weights and optimizer state."""

from __future__ import annotations

from pathlib import Path

from parallelrun import checkpoint
from parallelrun.config.schema import Config
from parallelrun.errors import CheckpointError, Problem
from parallelrun.train.build import Training
from parallelrun.train.scaler import LossScaler


def due(config: Config, step: int, stopping: bool) -> bool:
    """True if the run saves after this step: periodically, when asked to stop, and after the last if wanted."""
    if stopping:
        return True
    every = config.checkpoint.every
    return (every > 0 and step % every == 0) or (config.checkpoint.last and step == config.steps)


def save(training: Training, scaler: LossScaler, step: int, run_directory: Path) -> None:
    """Write `checkpoints/step_<n>` of the run and delete the ones beyond `checkpoint.keep`."""
    config, plan = training.config, training.plan
    extra = {
        "step": step,
        "samples": step * plan.batch.global_batch,
        "global_batch": plan.batch.global_batch,
        "seed": config.seed,
        "dataset": {"name": config.dataset.name, "fingerprint": training.dataset.fingerprint},
        "scaler": scaler.state(),
    }
    directory = run_directory / "checkpoints"
    checkpoint.save(directory, step, training.parameters, training.optimizer, extra, plan, training.mesh)
    checkpoint.keep_last(directory, config.checkpoint.keep, training.mesh)


def resume(training: Training, scaler: LossScaler) -> int:
    """Load `config.resume` if given; return the step it was saved after, else 0. Raises CheckpointError."""
    config, plan = training.config, training.plan
    if not config.resume:
        return 0
    path = checkpoint.resolve_resume(config.resume, config.runs)
    extra = checkpoint.load(path, training.parameters, training.optimizer, plan, training.mesh)
    training.data.finish_update()  # zero1: the loaded shards go back into the weights
    if extra["global_batch"] != plan.batch.global_batch:
        raise CheckpointError(
            Problem(
                f"global_batch={plan.batch.global_batch}, but {path} was trained with {extra['global_batch']}: "
                "the order of samples would change",
                where="global_batch",
                suggestion=f"global_batch={extra['global_batch']}",
            )
        )
    scaler.load_state(extra["scaler"])
    return int(extra["step"])
