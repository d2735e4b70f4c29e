"""Finds run directories: all of a `runs` folder, and those that a user names.

A run is `<runs>/<name>/<time>-<random>`, a point of a sweep `<runs>/sweep-<time>-<random>/<number>-<preset>-<degrees>`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from parallelrun.base.errors import ConfigError, Problem
from parallelrun.base.wording import closest

CONFIG, MANIFEST, STATUS, SWEEP = "config.yaml", "manifest.json", "status.json", "results.jsonl"
EVENTS = "events.jsonl"  # what happened to a run beside its steps
LATEST = "latest"
_TIME = re.compile(r"(?:sweep-)?(\d{8}T\d{6}Z)-[0-9a-f]+")


def is_run(directory: Path) -> bool:
    """Return whether a directory holds a run that got as far as its configuration."""
    return (directory / CONFIG).is_file() or (directory / MANIFEST).is_file()


def points(sweep: Path) -> list[Path]:
    """Return the runs of a sweep's points, by name, which begins with the point's number."""
    return [path for path in _folders(sweep) if is_run(path)]


def all_runs(runs: Path) -> list[Path]:
    """Return every directory of a run or point under `runs`, the newest first, by the times in the names.

    Only names are read, so that tens of thousands take a fraction of a second; whether a directory holds a run is
    known when it is read.
    """
    directories = []
    for group in _folders(runs):
        of_sweep = _TIME.fullmatch(group.name)
        for path in _folders(group):
            time = of_sweep or _TIME.fullmatch(path.name)
            if time is not None:
                directories.append((time[1], str(path)))
    return [Path(path) for _, path in sorted(directories, reverse=True)]


def resolve(words: Iterable[str], runs: Path) -> list[Path]:
    """Return the run directories that `words` mean, in their order.

    A word is a run directory, a sweep's directory (all its points), or below `runs`: `latest`, a name (its newest run)
    or the end of a directory's path: its name, its random end, of a point `<random end>/<name>`. Raises ConfigError.
    """
    return [path for word in words for path in _resolve(word, runs)]


def single_run(word: str, runs: Path) -> Path:
    """Return the one run directory that `word` means (see `resolve`). Raises ConfigError."""
    directories = resolve([word], runs)
    if len(directories) > 1:
        message = f"{word} is a sweep of {len(directories)} points; one run is needed"
        raise ConfigError(Problem(message, word, str(directories[0])))
    return directories[0]


def directory_of(word: str, runs: Path = Path("runs")) -> Path:
    """Return the path `word` if it exists, else the run below `runs` that it names (see `resolve`), else the path."""
    path = Path(word).expanduser()
    if path.exists():
        return path
    with suppress(ConfigError):
        directories = resolve([word], runs)
        return directories[0] if len(directories) == 1 else path
    return path


def _resolve(word: str, runs: Path) -> list[Path]:
    for path in (Path(word).expanduser(), runs / word):
        if is_run(path):
            return [Path(os.path.realpath(path))]
        if (path / SWEEP).is_file():
            runs_of_sweep = points(path)
            if not runs_of_sweep:
                raise ConfigError(Problem(f"{path}: no point of this sweep has run", word))
            return runs_of_sweep
        if path.is_dir() and path != runs:  # a name: its newest run
            named = [run for run in reversed(_folders(path)) if is_run(run)]
            if named:
                return [named[0]]
            raise ConfigError(Problem(f"{path} is not a run: it has no {CONFIG}", word, command="parallelrun runs ls"))
    ending = [path for path in all_runs(runs) if path.name == word or str(path).endswith(f"-{word}")]
    if len(ending) == 1 and is_run(ending[0]):
        return ending
    if len(ending) > 1:
        message = f"{word} means several runs: {', '.join(str(path) for path in ending[:4])}"
        raise ConfigError(Problem(message, word, str(ending[0])))
    near = closest(word, [path.name for path in _folders(runs)])[:3]
    message = f"no run {word}: neither a directory nor a name in {runs}"
    raise ConfigError(Problem(message, word, " or ".join(near), "parallelrun runs ls"))


def _folders(directory: Path) -> list[Path]:
    """The folders in a directory, sorted by name, without links; none if there is no such directory."""
    try:
        with os.scandir(directory) as entries:
            return sorted(Path(entry.path) for entry in entries if not entry.name.startswith(".")
                          and entry.is_dir(follow_symlinks=False))  # fmt: skip
    except OSError:
        return []
