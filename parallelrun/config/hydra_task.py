"""Hydra's description of the task that it has just started: a single run, or a point of a sweep."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from parallelrun.config.overrides import unquoted


def sweeping() -> bool:
    """Whether the running task is a point of a sweep."""
    return HydraConfig.get().mode == RunMode.MULTIRUN


def point_number() -> int:
    """The number of the running point of a sweep, from 0."""
    return int(HydraConfig.get().job.num)


def point_overrides(shown: Mapping[str, str]) -> list[str]:
    """The running point's overrides as the user would type them, without those about the sweep itself.

    shown: our name for a recipe's file -> the path that the user typed.
    """
    overrides = []
    for text in HydraConfig.get().overrides.task:
        key, _, value = text.partition("=")
        if key == "recipe":
            overrides.append(f"recipe={shown.get(value, value)}")
        elif key != "verb" and not key.startswith("sweep."):
            overrides.append(f"{key.removeprefix('++')}={unquoted(value)}")
    return overrides


def run_directory() -> Path | None:
    """The directory that the user asked for with `hydra.run.dir=...`, or None."""
    directory = str(HydraConfig.get().run.dir)
    return None if directory == "." else Path(directory).expanduser()


def subdirectory() -> str | None:
    """The name that the user gave the points' directories with `hydra.sweep.subdir=...`, for this point; or None."""
    name = str(HydraConfig.get().sweep.subdir)
    return None if name == "." else name


def searches() -> bool:
    """Whether the sweeper wants an answer of every point; Hydra's own runs every point and ignores answers."""
    return str(HydraConfig.get().runtime.choices["hydra/sweeper"]) != "basic"


def num_parallel_points(points: int | None) -> int:
    """How many points the launcher and the sweeper run at once on this host, at most.

    points: the number of points, if it is known. joblib counts processes as scikit-learn does: -1 means all cores. A
    launcher that names no number (submitit's local one) starts all that the sweeper gives it.
    """
    config = HydraConfig.get()
    jobs = [node.get("n_jobs") for node in (config.launcher, config.sweeper)]
    cores = os.cpu_count() or 1
    limits = [max(1, cores + 1 + number if number < 0 else number) for number in jobs if number]
    listed = None if config.sweeper.get("params") else points  # values to sweep in a file, too
    return min((number for number in (*limits, config.sweeper.get("max_batch_size"), listed) if number), default=1)
