"""Which checkpoints there are, and which old ones may go. Torch-free.

A step's directory is made under a hidden name and renamed when it is whole, so a visible `step_<n>` is complete unless
somebody damaged it. A replaced step is moved to a hidden name first; it counts for as long as no other holds its step.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
from pathlib import Path
from typing import Protocol

from parallelrun.checkpoint.files import remove_tree
from parallelrun.checkpoint.index import INDEX_FILE, Index, missing_files
from parallelrun.checkpoint.schema import read_index
from parallelrun.errors import CheckpointError, Problem

FOLDER = "checkpoints"
TRIES = 20  # to read what a live run may delete at any moment
STEP = re.compile(r"step_(\d+)")
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
    for _ in range(TRIES):
        found, vanished = _look(folder)
        if not vanished:
            break
    return dict(sorted(found.items()))


def _look(folder: Path) -> tuple[dict[int, Path], bool]:
    """(the complete checkpoints, whether one was deleted meanwhile: the run is alive, and has saved a newer one)."""
    found: dict[int, Path] = {}
    vanished = False
    try:
        names = sorted(os.listdir(folder))  # hidden ones come first, so that a visible step wins
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
                elif not name.startswith("."):  # a replaced one that is being deleted is nobody's loss
                    _log.warning("skipped: %s", error)
            else:
                found[int(match.group(1))] = folder / name
    return found, vanished


def latest(directory: Path) -> Path | None:
    """The complete checkpoint of the highest step in a run directory or `checkpoints` folder; None if there is none."""
    return next(reversed(complete_steps(directory).values()), None)


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
