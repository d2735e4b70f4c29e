"""Checks the paths of weights that a command names. It needs no torch, so what is wrong is said at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from parallelrun.base.errors import CheckpointError, ConfigError, EnvironmentProblem, ParallelrunError, Problem
from parallelrun.checkpoint.find import open_complete
from parallelrun.checkpoint.index import INDEX_FILE, Index
from parallelrun.checkpoint.resume import resolve_resume
from parallelrun.config import from_hf
from parallelrun.config.stored_tensors import SHARD_INDEX, SINGLE_FILE


def check_paths(
    source: str, where: str, out: str | None = None, problems: Sequence[Problem] = (), out_key: str = "out"
) -> None:
    """Raise all that is wrong with a command that reads the weights at `source` and writes the directory `out`.

    where, out_key: their names on the command line. problems: of its other arguments. Raises the error of the only kind
    that there is (ConfigError, CheckpointError, EnvironmentProblem), or ConfigError with several kinds of problems.
    """
    errors: list[ParallelrunError] = [ConfigError(*problems)] if problems else []
    checks: list[Callable[[], object]] = [partial(_check_source, source, where)]
    if out is not None:
        checks.append(partial(unused, Path(out), out_key))
    for check in checks:
        try:
            check()
        except (CheckpointError, EnvironmentProblem) as error:
            errors.append(error)
    if errors:
        raise errors[0] if len(errors) == 1 else ConfigError(*(p for error in errors for p in error.problems))


def _check_source(source: str, where: str) -> None:
    folder = absolute(source)
    if not ((folder / from_hf.CONFIG_FILE).is_file() or has_files(folder)):
        checkpoint_at(folder, where)


def absolute(path: str | os.PathLike[str]) -> Path:
    """Return the absolute path, with `~` expanded and links kept."""
    return Path(os.path.abspath(Path(path).expanduser()))


def has_files(folder: Path) -> bool:
    """Return whether a directory holds safetensors as transformers names them."""
    return (folder / SINGLE_FILE).is_file() or (folder / SHARD_INDEX).is_file()


def checkpoint_at(folder: Path, where: str) -> tuple[Path, Index]:
    """Return a complete checkpoint, that in `folder` or the newest of a run, with its index. Raises CheckpointError."""
    try:
        path = folder if (folder / INDEX_FILE).is_file() else resolve_resume(str(folder), ".")
        return path, open_complete(path)
    except CheckpointError as error:
        raise CheckpointError(*(replace(problem, where=where) for problem in error.problems)) from error


def unused(out: Path, where: str = "") -> Path:
    """Return the absolute path of a directory to write. Raises EnvironmentProblem unless it is new or empty."""
    out = absolute(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise EnvironmentProblem(Problem(f"{out} exists already; nothing was written", where or str(out)))
    return out
