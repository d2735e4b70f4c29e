"""Run directories as a launcher and rank 0 leave them, for the tests of what follows them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from parallelrun.base.records import append_jsonl, write_json
from parallelrun.planner.facts.document import document
from parallelrun.planner.resolve.freeze import freeze
from parallelrun.report.trackers import follow
from parallelrun.report.trackers.state import carry_over
from tests.plans import tiny_config, tiny_plan

NAMES = ("tensorboard", "wandb", "mlflow", "notebook")


def begin(folder: Path, name: str, **keys: Any) -> Path:
    """A run directory before the first step. keys: of the configuration, dotted."""
    directory = folder / "gpt" / name
    (directory / "logs").mkdir(parents=True)
    config, plan = tiny_config({"dp": 2, "runs": str(folder), **keys}), tiny_plan(dp=2)
    (directory / "config.yaml").write_text(freeze(config, plan))
    write_json(directory / "plan.json", document(plan, config))
    return directory


def train(directory: Path, steps: Iterable[int], loss: float = 1.0) -> None:
    for step in steps:
        row = {"step": step, "loss": loss / step, "lr": 0.1, "skipped": True, "grad_norm": None}
        append_jsonl(directory / "metrics.jsonl", row)


def end(directory: Path, state: str = "done", exit_code: int = 0, error: str | None = None) -> None:
    if state == "done":
        write_json(directory / "summary.json", {"state": state, "loss": 0.25, "model": "gpt"})
    write_json(directory / "status.json", {"state": state, "exit_code": exit_code, "error": error})


def tracked(directory: Path, name: str) -> None:
    """Follow a run that has ended, in this process."""
    ended = threading.Event()
    ended.set()
    follow.follow(directory, name, ended)


def followed_to_end(directory: Path, name: str, steps: Iterable[int], *ending: Any) -> Path:
    """The run trains these steps, ends (see `end`), and is followed in this process."""
    train(directory, steps)
    end(directory, *ending)
    tracked(directory, name)
    return directory


def resumed(before: Path, name: str, step: int, **keys: Any) -> Path:
    """The directory of a run that continues another one from `step`."""
    directory = begin(before.parents[1], name, **keys)
    carry_over(before, directory, NAMES, step)
    return directory


def interrupted_and_resumed(folder: Path, name: str, **keys: Any) -> tuple[Path, Path]:
    """A run of 5 steps that was killed, and one that continues it from its checkpoint of step 3 to step 8; followed."""
    killed = "failed", 6, "rank 1 died: SIGKILL"
    first = followed_to_end(begin(folder, "first", **keys), name, range(1, 6), *killed)
    second = resumed(first, "second", 3, **keys)
    train(second, range(4, 9), loss=2.0)
    end(second)
    tracked(second, name)
    return first, second


def state_of(directory: Path, name: str) -> dict[str, Any]:
    return json.loads((directory / "trackers" / f"{name}.json").read_text())
