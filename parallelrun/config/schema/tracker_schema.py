"""The section `tracker`."""

from __future__ import annotations

from dataclasses import dataclass

from parallelrun.config.schema.field import key


@dataclass
class TrackerConfig:
    """Where a run is tracked beside its own records. `tracker=NAME` and `tracker=[NAME,NAME]` set `tracker.use`."""

    use: list[str] = key(list, "trackers: tensorboard, wandb, mlflow, plug-ins; short name: tracker")
    project: str = key("parallelrun", "project (wandb) or experiment (mlflow) of the run")
    name: str | None = key(None, "name of the run in trackers; null: the name of its directory")
    group: str | None = key(None, "group of the run in trackers; null: the name of its sweep")
    tags: list[str] = key(list, "tags of the run in trackers")
    timeout_s: float = key(30.0, "seconds that a tracker may take after the end of training", above=0)
