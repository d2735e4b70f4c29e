"""Which checkpoint a run goes on from (`resume=`), whether it may, and how it is kept from deletion. Torch-free."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from parallelrun.checkpoint.files import remove_tree
from parallelrun.checkpoint.find import (
    FOLDER,
    STEP,
    TRIES,
    complete_steps,
    latest,
    open_complete,
    refuse_pickle,
    step_name,
)
from parallelrun.checkpoint.headers import check_header
from parallelrun.checkpoint.index import INDEX_FILE, Index, check_model
from parallelrun.checkpoint.schema import check_training
from parallelrun.config.schema import Config
from parallelrun.errors import CheckpointError, ConfigError, Problem
from parallelrun.plan.freeze import freeze, load_frozen
from parallelrun.plan.structure import Plan

LATEST = "latest"
AUTO = "auto"
CONFIG_FILE = "config.yaml"
_MAX_CONFIG_BYTES = 2**20
_OF_A_TRAINING = ("model", "dataset", "optimizer", "precision", "seed", "dropout", "global_batch")


@dataclass(frozen=True)
class Newest:
    """The checkpoint that was written last, and among how many runs with checkpoints."""

    path: Path
    step: int
    num_runs: int

    @property
    def run(self) -> Path:
        return self.path.parents[1]


def keeps_last_state(config: Config) -> bool:
    """Whether a run saves after its last step. A resumed run always does: otherwise its predecessor's last state would
    pass for the newest one."""
    return config.checkpoint.last is not False or bool(config.resume)


def newest(runs: Path, accepts: Callable[[Path], bool] = lambda run: True) -> Newest | None:
    """The complete checkpoint that was written last under `runs`, of the run directories that `accepts` takes."""
    for _ in range(TRIES):
        candidates, num_runs = [], 0
        for folder in _checkpoint_folders(runs):
            found = list(_times(folder)) if accepts(folder.parent) else []
            candidates += found
            num_runs += bool(found)
        if not candidates:
            return None
        (_, step), path = max(candidates)
        if path.exists():
            return Newest(path, step, num_runs)
    return None


def _times(folder: Path) -> Iterator[tuple[tuple[int, int], Path]]:
    """((when a step was written, its number), its directory) of every step."""
    for step, path in complete_steps(folder).items():
        try:
            yield ((path / INDEX_FILE).stat().st_mtime_ns, step), path
        except OSError:  # deleted by the run that goes on
            continue


def _checkpoint_folders(runs: Path) -> Iterator[Path]:
    for parent, folders, _ in os.walk(runs):
        if FOLDER in folders:
            yield Path(parent, FOLDER)
        folders[:] = sorted(name for name in folders if name != FOLDER and not name.startswith("."))


def resolve_resume(resume: str, runs: str) -> Path:
    """The checkpoint that `resume` means: `latest` (written last under `runs`), a run directory, or a checkpoint.

    Raises CheckpointError (exit 4) with the steps that are available, and for pickle files.
    """
    if resume == LATEST:
        found = newest(Path(runs).expanduser())
        if found is None:
            raise no_checkpoint(runs)
        return found.path
    path = Path(os.path.abspath(Path(resume).expanduser()))
    refuse_pickle(path)
    if (path / INDEX_FILE).exists():
        open_complete(path)
        return path
    is_step = STEP.fullmatch(path.name) is not None
    if path.is_dir() and not is_step:
        of_run = latest(path)
        if of_run is None:
            raise CheckpointError(Problem(f"no complete checkpoint in {path}", where="resume"))
        return of_run
    what = f"{path} is half-written: it has no {INDEX_FILE}" if path.exists() else f"no such checkpoint: {path}"
    steps = complete_steps(path.parent)
    complete = f"complete there: {', '.join(map(step_name, steps))}" if steps else "and none there is complete"
    suggestion = f"resume={next(reversed(steps.values()))}" if steps else ""
    raise CheckpointError(Problem(f"{what}; {complete}", where="resume", suggestion=suggestion))


def no_checkpoint(runs: str) -> CheckpointError:
    """The error of `resume=latest` where no run has saved."""
    problem = f"no complete checkpoint under {os.path.abspath(Path(runs).expanduser())}"
    return CheckpointError(Problem(problem, where="resume", suggestion="resume=auto, which then starts fresh"))


def saved_config(run: Path) -> Config | None:
    """The configuration of the run that saved in `run`, or None where nothing but checkpoints is kept.

    Raises CheckpointError.
    """
    file = run / CONFIG_FILE
    if not file.is_file():
        return None
    try:
        if file.stat().st_size > _MAX_CONFIG_BYTES:
            raise CheckpointError(Problem(f"{file} has more than {_MAX_CONFIG_BYTES} bytes", where="resume"))
        return load_frozen(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, ConfigError) as error:
        raise CheckpointError(Problem(f"{file} cannot be read: {error}", where="resume")) from error


def same_training(config: Config, plan: Plan, run: Path) -> bool:
    """Whether the run in a directory trains the same model on the same data in the same way, under any plan."""
    try:
        saved = saved_config(run)
    except CheckpointError:
        return False
    return saved is not None and _of_a_training(load_frozen(freeze(config, plan))) == _of_a_training(saved)


def _of_a_training(frozen: Config) -> list[Any]:
    scaled = replace(frozen, optimizer=replace(frozen.optimizer, lr_scale=None))  # a number by now, by the plan
    return [getattr(scaled, key) for key in _OF_A_TRAINING]


@dataclass(frozen=True)
class Chosen:
    """The checkpoint to go on from, and its index as it was read: the file may be gone by now."""

    path: Path
    index: Index


def check_resume(config: Config, plan: Plan) -> Path | None:
    """The path that `choose` gives."""
    chosen = choose(config, plan)
    return chosen.path if chosen else None


def choose(config: Config, plan: Plan) -> Chosen | None:
    """Before any process is started: the checkpoint that `config.resume` means, if it can be gone on from.

    None without `resume`, and for `resume=auto` where this training has not saved yet. Looks at names, sizes, headers
    and the index, not at the numbers (every file is verified when it is loaded). Degrees may have changed, the global
    batch may not. Raises CheckpointError.
    """
    if not config.resume:
        return None
    for attempt in range(TRIES):
        if config.resume == AUTO:
            found = newest(Path(config.runs).expanduser(), lambda run: same_training(config, plan, run))
            if found is None:
                return None
            path = found.path
        else:
            path = resolve_resume(config.resume, config.runs)
        try:
            return Chosen(path, _check(path, plan))
        except CheckpointError:
            if path.exists() or attempt == TRIES - 1:
                raise
    raise AssertionError("unreachable")


def _check(path: Path, plan: Plan) -> Index:
    index = open_complete(path)
    check_model(index, plan, path)
    check_training(index, path)
    for name in index.files:
        check_header(index, path, name)
    trained_with = index.extra["global_batch"]
    if trained_with != plan.batch.global_batch:
        raise CheckpointError(
            Problem(
                f"global_batch={plan.batch.global_batch}, but {path} was trained with {trained_with}: the order of "
                "samples would change",
                where="global_batch",
                suggestion=f"global_batch={trained_with}",
            )
        )
    return index


def hold(chosen: Chosen, run_directory: Path) -> Path | None:
    """Give a run the checkpoint it goes on from as its own first one; its path there, None if it is gone meanwhile.

    The run that saved it may be alive and delete it at any moment: links keep the files, and take no room. Where the
    file system has none between the two places, the checkpoint stays where it is.
    """
    path, index = chosen.path, chosen.index
    folder = run_directory / FOLDER
    aside = folder / f".{step_name(index.step)}.tmp-{secrets.token_hex(4)}"
    try:
        aside.mkdir(mode=0o700, parents=True)
        for name in (*index.files, INDEX_FILE):
            os.link(path / name, aside / name)
        os.rename(aside, folder / step_name(index.step))
    except FileNotFoundError:
        remove_tree(aside)
        return None
    except OSError:
        remove_tree(aside)
        return path
    return folder / step_name(index.step)


def resumed_from(chosen: Chosen, dataset: str, fingerprint: str) -> tuple[dict[str, Any], str | None]:
    """(what the manifest says of the checkpoint a run goes on from, a warning if it was trained on other data).

    dataset, fingerprint: name and sha256 of the data this run reads. Other data is no reason to refuse (fine-tuning),
    but never goes unsaid: the order of samples is that of the new data.
    """
    path, index = chosen.path, chosen.index
    before = index.extra.get("dataset") or {"name": None, "fingerprint": None}
    changed = before["fingerprint"] is not None and before["fingerprint"] != fingerprint
    facts = {
        "checkpoint": str(path),
        "step": index.step,
        "dataset": before["name"],
        "dataset_sha256": before["fingerprint"],
        "dataset_changed": changed,
    }
    if not changed:
        return facts, None
    return facts, (
        f"THE DATA SET HAS CHANGED since {path} was saved: it was trained on {before['name']}, "
        f"sha256 {before['fingerprint']}; this run reads {dataset}, sha256 {fingerprint}. Training goes on with other "
        "samples than the uninterrupted run would have seen"
    )
