"""The saved state of each tracker (`trackers/<name>.json`), by which a resumed run continues the same record.

The run that continues another one also writes into the first one's file: whichever of them is resumed next, it finds
the last step that the tracker has.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from parallelrun.base.records import write_json

FOLDER = "trackers"


@dataclass(frozen=True)
class TrackerState:
    """A tracker's run. asked: the project, name and group that were asked for; identity: `Tracker.identity`.

    step: the last step that was logged; resumed_step: where the run of this directory began; first: the file of the
    run with which the tracker's run began.
    """

    asked: tuple[str | None, ...]
    identity: Mapping[str, Any] | None = None
    step: int = 0
    resumed_step: int = 0
    first: str = ""


def asked_of(config: Mapping[str, Any]) -> tuple[str | None, ...]:
    """Return what makes a tracker's run another one, if it is changed: project, name, group. config: as config.yaml."""
    return tuple(config["tracker"][key] for key in ("project", "name", "group"))


def path_of(directory: Path, name: str) -> Path:
    """Return the file of a tracker in a run directory."""
    return directory / FOLDER / f"{name}.json"


def read(path: Path) -> TrackerState | None:
    """Return a state; None if there is none, or it is broken."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        values = json.loads(path.read_text())
        del values["schema"]
        return TrackerState(**{**values, "asked": tuple(values["asked"])})
    return None


def write(path: Path, state: TrackerState) -> None:
    """Replace the file of a state, and the file of the run with which it began if there is one. Raises OSError."""
    for file in dict.fromkeys((path, Path(state.first or path))):
        with contextlib.suppress(FileNotFoundError):
            write_json(file, asdict(state))


def carry_over(before: Path, directory: Path, names: Iterable[str], step: int) -> None:
    """Let the run in `directory`, which continues the one in `before` from `step`, go on with the same trackers' runs.

    On a full disk, trackers start new runs.
    """
    for name in names:
        file = path_of(before, name)
        saved = read(file)
        if saved is not None:
            newest = read(Path(saved.first or file)) or saved
            target = path_of(directory, name)
            with contextlib.suppress(OSError):
                target.parent.mkdir(mode=0o700, exist_ok=True)
                write_json(target, asdict(replace(newest, resumed_step=step, first=newest.first or os.fspath(file))))
