"""Which files of checkpoints the memory of a host holds, and which checkpoint several hosts hold together. Torch-free.

A host has the files of its own ranks and copies of another host's (`checkpoint/memory.py`), and the index of all files.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from parallelrun.checkpoint.files import sync
from parallelrun.checkpoint.find import STEP, step_name
from parallelrun.checkpoint.index import INDEX_FILE
from parallelrun.checkpoint.schema import read_index
from parallelrun.errors import CheckpointError


@dataclass(frozen=True)
class Held:
    """What a host has of one checkpoint. index: the text of its index; files: those that it has; lacks: the others."""

    index: str
    files: list[str]
    lacks: list[str]


def held(folder: Path) -> dict[int, Held]:
    """Return what a host's folder holds of each checkpoint that was complete on all hosts, by step."""
    found = {}
    for path in list(folder.iterdir()):
        match = STEP.fullmatch(path.name)
        with suppress(CheckpointError, OSError):
            if match:
                index = read_index(path)
                lacks = [name for name in index.files if not has_file(path, name, index.files[name][0])]
                files = [name for name in index.files if name not in lacks]
                found[int(match[1])] = Held((path / INDEX_FILE).read_text(), files, lacks)
    return found


def has_file(path: Path, name: str, size: int) -> bool:
    """Return whether a checkpoint's directory has a file of that size."""
    with suppress(OSError):
        return (path / name).stat().st_size == size
    return False


def newest(hosts: Iterable[Mapping[int, Held]]) -> tuple[int, str] | None:
    """Return (step, index) of the newest checkpoint of which these hosts have all files together; None if none is."""
    found = list(hosts)
    for step in sorted({step for one in found for step in one}, reverse=True):
        parts = [one[step] for one in found if step in one]
        files = {name for part in parts for name in part.files}
        if len({part.index for part in parts}) == 1 and files.issuperset(parts[0].lacks):
            return step, parts[0].index
    return None


def keep_only(folder: Path, step: int, index: str) -> None:
    """Remove all that a host's folder holds but the checkpoint of `step` with this index. If it has nothing of that
    checkpoint, it gets the index, so that its ranks can fetch the files. Raises OSError."""
    kept = folder / step_name(step)
    for path in list(folder.iterdir()):
        if path != kept or not (kept / INDEX_FILE).exists() or (kept / INDEX_FILE).read_text() != index:
            remove(path)
    if not kept.exists():
        kept.mkdir()
        (kept / INDEX_FILE).write_text(index)


def copy_to(folder: Path, step: int, target: Path) -> None:
    """Copy the files that a host's folder holds of a checkpoint into `target`, on the disk, unless another host has
    done it. Raises OSError."""
    for path in (folder / step_name(step)).glob("*.safetensors"):
        if not has_file(target, path.name, path.stat().st_size):
            # Two hosts may have the same file: the last one wins.
            aside = target / f".{path.name}.{secrets.token_hex(4)}"
            shutil.copyfile(path, aside)
            sync(aside)
            os.rename(aside, target / path.name)


def remove_all(folder: Path, but: Path | None = None) -> None:
    """Remove all that a host's folder holds, but for the directory `but`. Raises OSError."""
    for path in list(folder.iterdir()):
        if path != but:
            remove(path)


def remove(path: Path) -> None:
    """Delete a checkpoint under a hidden name, so that a visible one is never incomplete. Raises OSError."""
    aside = path
    if not path.name.startswith("."):
        aside = path.with_name(f".{path.name}.gone-{secrets.token_hex(4)}")
        os.rename(path, aside)
    shutil.rmtree(aside, ignore_errors=True)
