"""Chooses the checkpoint that `resume=` means, checks it, and protects it from deletion."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from parallelrun.base.errors import CheckpointError, ConfigError, Problem
from parallelrun.checkpoint import find
from parallelrun.checkpoint.data import check_tokenizer
from parallelrun.checkpoint.index import INDEX_FILE, Index, check_model
from parallelrun.checkpoint.schema import check_header, check_training
from parallelrun.config.schema.run_schema import Config
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.resolve.freeze import freeze, load_frozen
from parallelrun.report.records.find import directory_of, is_run

LATEST = "latest"
AUTO = "auto"
CONFIG_FILE = "config.yaml"
_MAX_CONFIG_BYTES = 2**20
_OF_A_TRAINING = ("model", "dataset", "optimizer", "precision", "seed", "dropout", "global_batch", "init")


@dataclass(frozen=True)
class Newest:
    """The checkpoint that was written last, and the number of runs with checkpoints."""

    path: Path
    step: int
    num_runs: int

    @property
    def run(self) -> Path:
        return self.path.parents[1]


def keeps_last_state(config: Config) -> bool:
    """Return whether a run saves after its last step.

    A resumed run always does; otherwise the checkpoint from which it resumed would seem to be the newest.
    """
    return config.checkpoint.last is not False or bool(config.resume)


def newest(runs: Path, accepts: Callable[[Path], bool] = lambda run: True) -> Newest | None:
    """Return the complete checkpoint written last, of the run directories under `runs` that `accepts` takes.

    A live run may delete it at any moment.
    """
    of_runs = [list(_times(folder)) for folder in _checkpoint_folders(runs) if accepts(folder.parent)]
    candidates = [candidate for of_run in of_runs for candidate in of_run]
    if not candidates:
        return None
    (_, step), path = max(candidates)
    return Newest(path, step, num_runs=sum(map(bool, of_runs)))


def _times(folder: Path) -> Iterator[tuple[tuple[int, int], Path]]:
    """Yield ((time of writing, step), directory) of every complete checkpoint."""
    for step, path in find.complete_steps(folder).items():
        try:
            yield ((path / INDEX_FILE).stat().st_mtime_ns, step), path
        except OSError:  # a live run has deleted it
            continue


def _checkpoint_folders(runs: Path) -> Iterator[Path]:
    for parent, folders, _ in os.walk(runs):
        if find.FOLDER in folders:
            yield Path(parent, find.FOLDER)
        folders[:] = sorted(name for name in folders if name != find.FOLDER and not name.startswith("."))


def resolve_resume(resume: str, runs: str) -> Path:
    """Return the checkpoint of `resume`: `latest` (written last under `runs`), a checkpoint, a run (its directory, or
    what names it below `runs`), or a folder of runs, whose newest run is meant.

    Raises CheckpointError (exit 4) with the available steps, and for pickle files.
    """
    if resume == LATEST:
        saved = newest(Path(runs).expanduser())
        if saved is None:
            raise no_checkpoint(runs)
        return saved.path
    folder = Path(runs).expanduser()
    # A name stands for its folder, because its newest run may be the one that resumes.
    existing = next((path for path in (Path(resume).expanduser(), folder / resume) if path.exists()), None)
    path = Path(os.path.abspath(existing or directory_of(resume, folder)))
    find.refuse_pickle(path)
    if (path / INDEX_FILE).exists():
        find.open_complete(path)
        return path
    is_step = find.STEP.fullmatch(path.name) is not None
    if path.is_dir() and not is_step:
        if of_run := find.latest(path) or _latest_of_runs(path):
            return of_run
        hint = f"{other.path}, the newest of other runs" if (other := newest(folder)) else ""
        raise CheckpointError(Problem(f"no complete checkpoint in {path}", where="resume", suggestion=hint))
    message = f"{path} is incomplete: it has no {INDEX_FILE}" if path.exists() else f"no such checkpoint: {path}"
    steps = find.complete_steps(path.parent)
    if steps or is_step:
        message += f"; complete checkpoints in that directory: {', '.join(map(find.step_name, steps)) or 'none'}"
    hint = f"resume={next(reversed(steps.values()))}" if steps else ""
    raise CheckpointError(Problem(message, where="resume", suggestion=hint))


def _latest_of_runs(folder: Path) -> Path | None:
    """Return the last complete checkpoint of the newest run in a folder that has one, or None."""
    runs = sorted((path for path in folder.iterdir() if is_run(path)), reverse=True)
    return next(filter(None, map(find.latest, runs)), None)


def no_checkpoint(runs: str) -> CheckpointError:
    """Return the error of `resume=latest` if no run has saved."""
    problem = f"no complete checkpoint under {os.path.abspath(Path(runs).expanduser())}"
    return CheckpointError(Problem(problem, where="resume", suggestion="resume=auto, which then starts fresh"))


def saved_config(run: Path) -> Config | None:
    """Return the configuration of the run in `run`, or None if its directory has only checkpoints.

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
    """Return whether the run in a directory is the same training, under any plan: model, data, optimizer, seed, ..."""
    try:
        saved = saved_config(run)
    except CheckpointError:
        return False
    return saved is not None and _of_a_training(load_frozen(freeze(config, plan))) == _of_a_training(saved)


def _of_a_training(frozen: Config) -> list[Any]:
    scaled = replace(frozen, optimizer=replace(frozen.optimizer, lr_scale=None))  # the plan has made it a number
    return [getattr(scaled, key) for key in _OF_A_TRAINING]


@dataclass(frozen=True)
class Chosen:
    """The checkpoint from which a run resumes, and its index, which stays valid if the file is deleted."""

    path: Path
    index: Index


def choose(config: Config, plan: Plan) -> Chosen | None:
    """Return the checkpoint that `config.resume` means, before any process is started. Raises CheckpointError.

    None without `resume`, and for `resume=auto` if this training has not saved yet. Checks names, sizes, headers and
    the index; the sha256 of each file is checked when it is loaded. Degrees may differ from those of the saved run, the
    global batch must not.
    """
    if not config.resume:
        return None
    for attempt in range(find.TRIES):
        if config.resume == AUTO:
            saved = newest(Path(config.runs).expanduser(), lambda run: same_training(config, plan, run))
            if saved is None:
                return None
            path = saved.path
        else:
            path = resolve_resume(config.resume, config.runs)
        try:
            index = _check(path, plan)
            check_tokenizer(index.extra, config, path)
            return Chosen(path, index)
        except CheckpointError:
            if path.exists() or attempt == find.TRIES - 1:
                raise
    raise AssertionError("unreachable")


def _check(path: Path, plan: Plan) -> Index:
    index = find.open_complete(path)
    check_model(index, plan, path)
    check_training(index, path)
    for name in index.files:
        check_header(index, path, name)
    check_global_batch(index.extra, plan, path)
    return index


def check_global_batch(extra: Mapping[str, Any], plan: Plan, path: Path) -> None:
    """Raise CheckpointError if the checkpoint was trained with another global batch."""
    before, now = extra["global_batch"], plan.batch.global_batch
    if before != now:
        message = f"global_batch={now}, but {path} was trained with {before}: the order of samples would change"
        raise CheckpointError(Problem(message, where="global_batch", suggestion=f"global_batch={before}"))


def hold(chosen: Chosen, run_directory: Path) -> Path | None:
    """Link the checkpoint into a run's directory as its first; return its path, or None if it was deleted meanwhile.

    The run that saved it may still be alive and delete it at any moment. Hard links keep the files without using space.
    If the file system cannot link between the two directories, the checkpoint is used where it is.
    """
    path, index = chosen.path, chosen.index
    folder = run_directory / find.FOLDER
    aside = folder / f".{find.step_name(index.step)}.tmp-{secrets.token_hex(4)}"
    try:
        aside.mkdir(mode=0o700, parents=True)
        for name in (*index.files, INDEX_FILE):
            os.link(path / name, aside / name)
        os.rename(aside, folder / find.step_name(index.step))
    except FileNotFoundError:
        shutil.rmtree(aside, ignore_errors=True)
        return None
    except OSError:
        shutil.rmtree(aside, ignore_errors=True)
        return path
    return folder / find.step_name(index.step)
