"""Changes of a live run's plan: the request of `parallelrun reshape`, and `reshapes.json`, the answers."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parallelrun.base.records import write_json
from parallelrun.report.records.find import CONFIG

REQUEST, FILE, FOLDER = "reshape_request.json", "reshapes.json", "reshapes"


def ask(directory: Path, name: str, config: str) -> None:
    """Ask the run in a directory to go on under the plan of a frozen configuration. name: of this request."""
    write_json(directory / REQUEST, {"name": name, "config": config})


def is_asked(directory: Path) -> bool:
    """Return whether there is a request. Rank 0 looks in every step."""
    return os.path.exists(directory / REQUEST)


def take(directory: Path) -> dict[str, Any] | None:
    """Return the request and remove it; None if there is none, or no valid one."""
    request = None
    with contextlib.suppress(OSError, ValueError):
        request = json.loads((directory / REQUEST).read_text())
    with contextlib.suppress(OSError):
        (directory / REQUEST).unlink()
    is_valid = isinstance(request, dict) and all(isinstance(request.get(key), str) for key in ("name", "config"))
    return request if is_valid else None


def withdraw(directory: Path, name: str) -> None:
    """Remove the request of that name, if the run has not taken it."""
    with contextlib.suppress(OSError, ValueError):
        if json.loads((directory / REQUEST).read_text())["name"] == name:
            (directory / REQUEST).unlink()


def answers(directory: Path) -> list[dict[str, Any]]:
    """Return the answers of a run, in their order.

    Each has `name`, `step` (the last one under the old plan), and `error`, or the degrees `before` and `after`,
    `seconds`, and `moved_bytes` between ranks.
    """
    with contextlib.suppress(OSError, ValueError, KeyError):
        return list(json.loads((directory / FILE).read_text())["reshapes"])
    return []


def answer(directory: Path, fields: Mapping[str, Any], config: str = "") -> None:
    """Append an answer; keep the frozen configuration of the new plan in `reshapes/<number>/`."""
    rows = [*answers(directory), dict(fields)]
    if config:
        folder = directory / FOLDER / str(len(rows))
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / CONFIG).write_text(config)
    write_json(directory / FILE, {"reshapes": rows})


def config_file(directory: Path) -> Path | None:
    """Return the frozen configuration of the last change of plan; None if there was none."""
    numbers = [number for number, row in enumerate(answers(directory), 1) if "error" not in row]
    return directory / FOLDER / str(numbers[-1]) / CONFIG if numbers else None


def status(directory: Path) -> dict[str, Any]:
    """Return the fields of status.json; empty for a run whose plan has not changed."""
    reshaped = [row for row in answers(directory) if "error" not in row]
    return {"degrees": reshaped[-1]["after"], "reshaped_after_step": reshaped[-1]["step"]} if reshaped else {}


def summary(directory: Path) -> dict[str, Any]:
    """Return the fields of summary.json; empty for a run whose plan has not changed."""
    reshaped = [row for row in answers(directory) if "error" not in row]
    return {"reshapes": len(reshaped), "reshape_s": sum(row["seconds"] for row in reshaped)} if reshaped else {}
