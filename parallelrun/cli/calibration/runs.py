"""TimedStep times of runs that were made anyway, as `calibrate from=runs/...` adds them to a fit."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from parallelrun.base.errors import ConfigError, ParallelrunError, Problem
from parallelrun.cli.calibration.constants import PlannedStep, step_seconds
from parallelrun.cli.calibration.measurements import CPU, Measurements, Sample, TimedStep
from parallelrun.cli.calibration.session import sample_of
from parallelrun.config.schema.cluster_schema import ClusterConfig

KEY = "from"


def check_folders(folders: list[str]) -> None:
    """Raise ConfigError with every folder that is no run's, before anything is measured."""
    absent = [folder for folder in folders if not (Path(folder).expanduser() / "config.yaml").is_file()]
    if absent:
        raise ConfigError(*(Problem(f"{KEY}={folder}: no config.yaml of a run is there", KEY) for folder in absent))


def steps_of(folders: list[str], measured: Measurements, cluster: ClusterConfig) -> list[TimedStep]:
    """The step time of each run directory. Raises ConfigError with every one that cannot be used, and why."""
    problems, steps = [], []
    for folder in folders:
        try:
            step = _step(Path(folder).expanduser(), measured)
            if not step_seconds(PlannedStep.of(step).plan, cluster):
                raise ValueError("the time of its plan cannot be predicted")
            steps.append(step)
        except (OSError, ValueError, KeyError, TypeError, ParallelrunError) as error:
            why = f"{os.strerror(error.errno)}" if isinstance(error, OSError) and error.errno else str(error)
            problems.append(Problem(f"{KEY}={folder}: {why}", KEY, f"{KEY}=RUN, a directory with bench.json"))
    if problems:
        raise ConfigError(*problems)
    return steps


def _step(folder: Path, measured: Measurements) -> TimedStep:
    config = (folder / "config.yaml").read_text(encoding="utf-8")
    bench, summary = (_json(folder / f"{name}.json") for name in ("bench", "summary"))
    if bench is None and summary is None:
        raise ValueError("it has neither bench.json nor summary.json: the run did not end")
    sample = sample_of(bench, measured.cores) if bench is not None else Sample(summary["step_time_median_s"], 0.0)
    device = (bench or summary)["device"]
    if device != measured.device:
        raise ValueError(f"it ran on {device}, and the calibration is of {measured.device}")
    if measured.clock == CPU and not sample.cpu_s:
        raise ValueError("only a bench counts CPU seconds, by which this calibration was made on a shared machine")
    if not sample.wall_s or sample.wall_s <= 0:
        raise ValueError("no step was timed")
    return TimedStep(folder.name, config, sample, str(folder))


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
