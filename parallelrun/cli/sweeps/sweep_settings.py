"""Where a sweep's files go, and what Hydra is told beside the command line."""

from __future__ import annotations

import os
import secrets
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

from parallelrun.base.errors import EnvironmentProblem, Problem
from parallelrun.cli.argv import CommandLine
from parallelrun.config import compose, hydra_settings
from parallelrun.config.compose import Prepared
from parallelrun.config.hydra_settings import SweepSettings
from parallelrun.config.overrides import quote, unquoted
from parallelrun.report.sweeps import sweep_rows


def with_mode_of_files(line: CommandLine) -> CommandLine:
    """`line` with `-m` if a file of the user's own folder sets `hydra.mode: MULTIRUN`."""
    prepared = compose.prepare(line.overrides, line.flags, line.verb, line.trust)
    settings = hydra_settings.of_sweep(prepared.argv)
    if settings is None or not settings.is_sweep:
        return line
    return replace(line, multirun=True, flags=(*line.flags, "-m"))  # Hydra 1.4 refuses a file's mode


def _given(line: CommandLine, key: str) -> str | None:
    values = [unquoted(override.value) for override in line.overrides if override.key == key]
    return os.path.expanduser(values[-1]) if values and values[-1].lower() != "null" else None


def of(line: CommandLine, prepared: Prepared) -> SweepSettings | None:
    """Hydra's own settings, where the command line or a file of the user's may have changed them."""
    changed = set(line.flags) - {"-m", "--multirun"} or any(override.is_hydra for override in line.overrides)
    return hydra_settings.of_sweep(prepared.argv) if changed else None


def directory(line: CommandLine, settings: SweepSettings | None) -> Path:
    """The sweep's directory: a new one, or the one to continue."""
    resume = _given(line, "sweep.resume")
    if resume is not None:
        if not (Path(resume) / sweep_rows.RESULTS).is_file():
            cause = f"sweep.resume={resume}: not a sweep directory (it has no {sweep_rows.RESULTS})"
            raise EnvironmentProblem(Problem(cause, "sweep.resume", command="ls -d runs/sweep-*"))
        return Path(resume).absolute()
    of_hydra = settings.directory if settings else _given(line, "hydra.sweep.dir")
    place = _given(line, "sweep.directory") or (os.path.expanduser(of_hydra) if of_hydra else None)
    if place is not None:
        if (Path(place) / sweep_rows.RESULTS).exists():
            cause = f"{place} already holds a sweep"
            raise EnvironmentProblem(Problem(cause, "sweep.directory", f"sweep.resume={place}, or another directory"))
        return Path(place).absolute()
    stamp = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    return (Path(_given(line, "runs") or "runs") / f"sweep-{stamp}-{secrets.token_hex(3)}").absolute()


def overrides(line: CommandLine, settings: SweepSettings | None, place: Path, scratch: str) -> list[str]:
    """Overrides of Hydra's own settings.

    Illegal and failed points must not end an optimizing sweeper. Hydra's multirun.yaml goes to the directory that the
    user has named, else to a scratch folder, or beside our files if a plug-in stores files too.
    """
    overrides = ["hydra.sweeper.max_failure_rate=1.0"] if settings and settings.counts_failures else []
    of_hydra = Path(scratch)
    if line.verb != "plan" and settings is not None and settings.directory is not None:
        of_hydra = place  # again, because Hydra would resolve its `${now:...}` a second time
    elif line.verb != "plan" and settings is not None and settings.uses_plugin:
        of_hydra = place / "hydra"
    return [*overrides, f"hydra.sweep.dir={quote(str(of_hydra), is_path=True)}"]
