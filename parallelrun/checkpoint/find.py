"""Lists the complete checkpoints of a run and deletes old ones.

A step's directory has a hidden name until it is complete, so a visible `step_<n>` is complete unless it was damaged. A
checkpoint that is being replaced gets a hidden name first; it still counts until the new one has its name.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
from pathlib import Path

from parallelrun.base.errors import CheckpointError, Problem
from parallelrun.checkpoint.index import INDEX_FILE, Index, missing_files
from parallelrun.checkpoint.schema import read_index

FOLDER = "checkpoints"
TRIES = 20  # to read checkpoints that a live run may delete at any moment
STEP = re.compile(r"step_(\d+)")
_REPLACED = re.compile(r"\.step_(\d+)\.old-[0-9a-f]+")
_LEFT_OVER = re.compile(r"\.step_\d+\.(tmp|old|gone)-[0-9a-f]+")
_PICKLES = {".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".bin", ".distcp"}
_log = logging.getLogger(__name__)


def step_name(step: int) -> str:
    return f"step_{step}"


def open_complete(path: Path) -> Index:
    """Return the index of a checkpoint. Raises CheckpointError unless all files exist in full size."""
    refuse_pickle(path)
    index = read_index(path)
    if wrong := missing_files(index, path):
        raise CheckpointError(Problem(f"{path} is incomplete: {'; '.join(wrong[:5])} ({len(wrong)} files)"))
    return index


def complete_steps(directory: Path) -> dict[int, Path]:
    """Return the complete checkpoints of a `checkpoints` folder or of its run directory, by step, ascending.

    Incomplete or damaged ones are left out, each with a warning in the log.
    """
    folder = directory / FOLDER if (directory / FOLDER).is_dir() else directory
    for _ in range(TRIES):
        steps, vanished = _look(folder)
        if not vanished:
            break
    return dict(sorted(steps.items()))


def _look(folder: Path) -> tuple[dict[int, Path], bool]:
    """Return the complete checkpoints, and whether one was deleted meanwhile by a live run that saved a newer one."""
    steps: dict[int, Path] = {}
    vanished = False
    try:
        names = sorted(os.listdir(folder))  # hidden names sort first, so that a visible step wins
    except OSError:
        return {}, False
    for name in names:
        match = STEP.fullmatch(name) or _REPLACED.fullmatch(name)
        if match and (folder / name).is_dir():
            try:
                open_complete(folder / name)
            except CheckpointError as error:
                if not (folder / name).exists():
                    vanished = True
                elif not name.startswith("."):  # a replaced one is being deleted as intended
                    _log.warning("skipped: %s", error)
            else:
                steps[int(match.group(1))] = folder / name
    return steps, vanished


def latest(directory: Path) -> Path | None:
    """Return the complete checkpoint of the highest step in a run directory or `checkpoints` folder, or None."""
    return next(reversed(complete_steps(directory).values()), None)


def keep_last(directory: Path, keep: int, rank: int) -> None:
    """Delete all but the newest `keep` complete checkpoints, and the remains of crashed saves.

    Only rank 0 deletes, after a save has succeeded on all ranks. keep < 1 keeps all. A checkpoint gets a hidden name
    before its files are deleted, so that a visible one is always complete.
    """
    if rank != 0:
        return
    steps = complete_steps(directory)
    retained = set(list(steps.values())[-keep:]) if keep > 0 else set(steps.values())
    try:
        for step, path in steps.items():
            if path not in retained:
                os.rename(path, directory / f".{step_name(step)}.gone-{secrets.token_hex(4)}")
            elif path.name != step_name(step) and not (directory / step_name(step)).exists():
                os.rename(path, directory / step_name(step))  # the save that was to replace it crashed
        left_over = [directory / name for name in os.listdir(directory) if _LEFT_OVER.fullmatch(name)]
    except OSError as error:  # training must not stop because of old checkpoints
        _log.warning("old checkpoints could not be deleted: %s", error)
        return
    for path in left_over:
        if path not in retained:
            shutil.rmtree(path, ignore_errors=True)


def refuse_pickle(path: Path) -> None:
    """Raise CheckpointError for a path with pickle files, which can run code when they are read."""
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
