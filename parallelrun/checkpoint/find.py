"""Which checkpoint is meant, and which old ones may go. Torch-free.

A step's directory is made under a hidden name and renamed when it is whole, so a visible `step_<n>` is complete unless
somebody damaged it. A replaced step is moved to a hidden name first; it counts for as long as no other holds its step.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from parallelrun.checkpoint.files import remove_tree
from parallelrun.checkpoint.index import INDEX_FILE, Index, check_model, missing_files, read_index
from parallelrun.config.schema import Config
from parallelrun.errors import CheckpointError, Problem
from parallelrun.plan.structure import Plan

LATEST = "latest"
FOLDER = "checkpoints"
_STEP = re.compile(r"step_(\d+)")
_REPLACED = re.compile(r"\.step_(\d+)\.old-[0-9a-f]+")
_LEFT_OVER = re.compile(r"\.step_\d+\.(tmp|old|gone)-[0-9a-f]+")
_PICKLES = {".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".bin", ".distcp"}
_log = logging.getLogger(__name__)


class HasRank(Protocol):
    rank: int


def step_name(step: int) -> str:
    return f"step_{step}"


def open_complete(path: Path) -> Index:
    """The index of a checkpoint whose files are all there in full size. Raises CheckpointError saying what is not."""
    refuse_pickle(path)
    index = read_index(path)
    if wrong := missing_files(index, path):
        raise CheckpointError(Problem(f"{path} is incomplete: {'; '.join(wrong[:5])} ({len(wrong)} files)"))
    return index


def complete_steps(directory: Path) -> dict[int, Path]:
    """The complete checkpoints of a `checkpoints` folder or of the run directory above it, by step, ascending.

    Half-written or damaged ones are left out, each with a warning in the log.
    """
    folder = directory / FOLDER if (directory / FOLDER).is_dir() else directory
    found: dict[int, Path] = {}
    try:
        names = sorted(os.listdir(folder))  # hidden ones come first, so that a visible step wins
    except OSError:
        return {}
    for name in names:
        match = _STEP.fullmatch(name) or _REPLACED.fullmatch(name)
        if match and (folder / name).is_dir():
            try:
                open_complete(folder / name)
            except CheckpointError as error:
                if not name.startswith("."):  # a replaced one that is being deleted is nobody's loss
                    _log.warning("skipped: %s", error)
            else:
                found[int(match.group(1))] = folder / name
    return dict(sorted(found.items()))


def latest(directory: Path) -> Path | None:
    """The complete checkpoint of the highest step in a run directory or `checkpoints` folder; None if there is none."""
    return next(reversed(complete_steps(directory).values()), None)


def resolve_resume(resume: str, runs: str) -> Path:
    """The checkpoint that `resume` means: `latest` (written last under `runs`), a run directory, or a checkpoint.

    Raises CheckpointError (exit 4) with the steps that are available, and for pickle files.
    """
    if resume == LATEST:
        return _latest_of_all(Path(runs).expanduser())
    path = Path(os.path.abspath(Path(resume).expanduser()))
    refuse_pickle(path)
    if (path / INDEX_FILE).exists():
        open_complete(path)
        return path
    is_step = _STEP.fullmatch(path.name) is not None
    if path.is_dir() and not is_step:
        found = latest(path)
        if found is None:
            raise CheckpointError(Problem(f"no complete checkpoint in {path}", where="resume"))
        return found
    what = f"{path} is half-written: it has no {INDEX_FILE}" if path.exists() else f"no such checkpoint: {path}"
    steps = complete_steps(path.parent)
    complete = f"complete there: {', '.join(map(step_name, steps))}" if steps else "and none there is complete"
    suggestion = f"resume={next(reversed(steps.values()))}" if steps else ""
    raise CheckpointError(Problem(f"{what}; {complete}", where="resume", suggestion=suggestion))


def check_resume(config: Config, plan: Plan) -> Path | None:
    """Before any process is started: the checkpoint that `config.resume` means, if it can be gone on from.

    Looks at names, sizes and the index, not at the numbers (every file is verified when it is loaded). Degrees may have
    changed, the global batch may not. Raises CheckpointError.
    """
    if not config.resume:
        return None
    path = resolve_resume(config.resume, config.runs)
    index = open_complete(path)
    check_model(index, plan, path)
    trained_with = index.extra.get("global_batch", plan.batch.global_batch)
    if trained_with != plan.batch.global_batch:
        raise CheckpointError(
            Problem(
                f"global_batch={plan.batch.global_batch}, but {path} was trained with {trained_with}: the order of "
                "samples would change",
                where="global_batch",
                suggestion=f"global_batch={trained_with}",
            )
        )
    return path


def resumed_from(path: Path, dataset: str, fingerprint: str) -> tuple[dict[str, Any], str | None]:
    """(what the manifest says of the checkpoint a run goes on from, a warning if it was trained on other data).

    dataset, fingerprint: name and sha256 of the data this run reads. Other data is no reason to refuse (fine-tuning),
    but never goes unsaid: the order of samples is that of the new data. Raises CheckpointError.
    """
    extra = read_index(path).extra
    before = extra.get("dataset") or {"name": None, "fingerprint": None}
    changed = before["fingerprint"] is not None and before["fingerprint"] != fingerprint
    facts = {
        "checkpoint": str(path),
        "step": extra.get("step"),
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


def keep_last(directory: Path, keep: int, mesh: HasRank) -> None:
    """Delete the checkpoints older than the newest `keep` complete ones, and what crashed saves left behind.

    Rank 0 does it, after a save has succeeded on all ranks; the others do nothing. keep < 1 keeps all. There are never
    fewer than `keep` complete ones on disk: each goes under a hidden name before its files are deleted.
    """
    if mesh.rank != 0:
        return
    steps = complete_steps(directory)
    kept = set(list(steps.values())[-keep:]) if keep > 0 else set(steps.values())
    try:
        for step, path in steps.items():
            if path not in kept:
                os.rename(path, directory / f".{step_name(step)}.gone-{secrets.token_hex(4)}")
            elif path.name != step_name(step) and not (directory / step_name(step)).exists():
                os.rename(path, directory / step_name(step))  # its replacement never came: a crash
        left_over = [directory / name for name in os.listdir(directory) if _LEFT_OVER.fullmatch(name)]
    except OSError as error:  # too many checkpoints are no reason to stop a training
        _log.warning("old checkpoints stay: %s", error)
        return
    for path in left_over:
        if path not in kept:
            remove_tree(path)


def _latest_of_all(runs: Path) -> Path:
    newest: tuple[int, int] | None = None
    chosen = None
    for folder in _checkpoint_folders(runs):
        for step, path in complete_steps(folder).items():
            order = ((path / INDEX_FILE).stat().st_mtime_ns, step)
            if newest is None or order > newest:
                newest, chosen = order, path
    if chosen is None:
        problem = f"no complete checkpoint under {os.path.abspath(runs)}"
        raise CheckpointError(Problem(problem, where="resume", command="parallelrun checkpoint.every=10"))
    return chosen


def _checkpoint_folders(runs: Path) -> Iterator[Path]:
    for parent, folders, _ in os.walk(runs):
        if FOLDER in folders:
            yield Path(parent, FOLDER)
        folders[:] = sorted(name for name in folders if name != FOLDER and not name.startswith("."))


def refuse_pickle(path: Path) -> None:
    """Files that are Python programs in disguise are not opened, whoever made them."""
    names = [path.name] if path.is_file() else []
    if path.is_dir() and not (path / INDEX_FILE).exists():
        names = os.listdir(path)
    pickled = [name for name in names if name == ".metadata" or Path(name).suffix in _PICKLES]
    if pickled:
        raise CheckpointError(
            Problem(
                f"{path} holds pickle ({pickled[0]}), which can run code when it is read: refused",
                where="resume",
                suggestion="load it in a program you trust and save its tensors with parallelrun.checkpoint",
            )
        )
