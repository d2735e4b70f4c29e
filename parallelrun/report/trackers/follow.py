"""One tracker of one run, in a process of its own: `python -m parallelrun.report.trackers.follow <directory> <name>`.

It reads the rows of metrics.jsonl as they are written and gives them to the tracker, so that no call can delay or end
the training: the queue is a file. The end of its standard input means the end of the run, also if the launcher dies;
then it has `tracker.timeout_s` seconds to finish. It warns on its standard error, at most once.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import yaml

from parallelrun.base.records import redacted
from parallelrun.base.registry import PlugInFailed
from parallelrun.report import trackers
from parallelrun.report.sweeps.sweep_rows import read_json
from parallelrun.report.trackers import TrackedRun, Tracker, state
from parallelrun.report.trackers.state import TrackerState

POLL_S = 0.25
STATUS_S = 5.0  # for the last word on a run whose launcher has ended: another rank may write it
_MOST_BYTES = 2**20  # of metrics.jsonl that are read at once
_STATES = {"done": trackers.FINISHED, **dict.fromkeys(("preempted", "interrupted"), trackers.INTERRUPTED)}


class RowTail:
    """The complete rows of metrics.jsonl that have not been read yet.

    A restart replaces the file by one with fewer rows, which is read from its beginning.
    """

    def __init__(self, path: Path):
        self._path, self._offset = path, 0
        self._file = 0  # its inode

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield them, in parts, so that a long file takes little memory."""
        while block := self._block():
            self._offset += len(block)
            for line in block.splitlines():
                yield json.loads(line)

    def _block(self) -> bytes:
        try:
            with open(self._path, "rb") as file:
                if (inode := os.fstat(file.fileno()).st_ino) != self._file:
                    self._file, self._offset = inode, 0
                file.seek(self._offset)
                block = file.read(_MOST_BYTES)
        except FileNotFoundError:
            return b""
        return block[: block.rfind(b"\n") + 1]


def run_of(directory: Path, before: TrackerState) -> TrackedRun:
    """Return what the files of a run directory say about the run."""
    config = yaml.safe_load((directory / "config.yaml").read_text())
    plan = json.loads((directory / "plan.json").read_text())
    settings = config["tracker"]
    first = Path(before.first).parents[1] if before.first else directory
    return TrackedRun(
        directory=directory,
        runs=Path(config["runs"]).expanduser().absolute(),
        project=settings["project"],
        name=settings["name"] or f"{first.parent.name}/{first.name}",
        group=settings["group"],
        tags=tuple(settings["tags"]),
        config=redacted(config),
        plan=_facts(plan),
        identity=before.identity,
        resumed_step=before.resumed_step,
    )


def _facts(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return the degrees of plan.json and what it predicts."""
    memory, seconds = plan["memory"], plan["time"]
    heaviest = max(memory["per_position"], key=lambda row: row["position"] == memory["heaviest_position"])
    return {
        **{key: plan[key] for key in ("preset", "world")},
        **plan["degrees"],
        "microbatches": plan["batch"]["microbatches"],
        "predicted_step_time_s": seconds["step_s"] if seconds else None,
        "predicted_memory_bytes": heaviest["total"],
        "predicted_bubble": plan["schedule"]["bubble_of_total"],
    }


def state_before(directory: Path, name: str) -> TrackerState:
    """Return the tracker's state that the launcher has carried over, if the same run is asked for; else a new one."""
    requested = state.asked_of(yaml.safe_load((directory / "config.yaml").read_text()))
    saved = state.read(state.path_of(directory, name))
    return saved if saved is not None and saved.asked == requested else TrackerState(requested)


def end_of(directory: Path) -> tuple[str, dict[str, Any]]:
    """Return how the run has ended, and its summary."""
    deadline = time.monotonic() + STATUS_S
    while (status := read_json(directory / "status.json")).get("state") in (None, "running"):
        if time.monotonic() > deadline:
            status = {"state": "failed", "exit_code": None, "error": "the launcher has ended without a status"}
            break
        time.sleep(POLL_S)
    ended = _STATES.get(status["state"], trackers.FAILED)
    summary = {**read_json(directory / "summary.json"), **{key: status[key] for key in ("exit_code", "error")}}
    return ended, redacted(summary)


def follow(directory: Path, name: str, ended: threading.Event) -> None:
    """Track the run until it has ended. Raises whatever the tracker raises."""
    file = state.path_of(directory, name)
    file.parent.mkdir(mode=0o700, exist_ok=True)
    tracker_state = state_before(directory, name)
    tracker = trackers.tracker_class(name)(run_of(directory, tracker_state))
    logged = tracker_state.resumed_step if tracker.takes_back_steps else tracker_state.step
    tracker_state = replace(tracker_state, identity=tracker.identity, step=logged)
    state.write(file, tracker_state)
    tail = RowTail(directory / "metrics.jsonl")
    over = False
    while not over:
        over = ended.wait(POLL_S)  # the rows that were written before the end are read after it
        tracker_state = _log(tracker, tail, tracker_state, file)
    tracker.finish(*end_of(directory))


def _log(tracker: Tracker, tail: RowTail, tracker_state: TrackerState, file: Path) -> TrackerState:
    """Log the new rows. Return the state with the last step, which is written once they are flushed."""
    step = tracker_state.step
    for row in tail.rows():
        if row["step"] > step:
            step = row["step"]
            tracker.log(step, trackers.numbers(row))
    if step == tracker_state.step:
        return tracker_state
    tracker.flush()
    tracker_state = replace(tracker_state, step=step)
    state.write(file, tracker_state)
    return tracker_state


def main(folder: str, name: str) -> NoReturn:
    """Follow the run in `folder`. The process ends here, whatever the tracker's threads do."""
    with contextlib.suppress(OSError):
        os.nice(10)
    directory, terminal = Path(folder), os.fdopen(os.dup(2), "w", buffering=1)
    log = os.open(directory / "logs" / f"tracker_{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    timeout_s = yaml.safe_load((directory / "config.yaml").read_text())["tracker"]["timeout_s"]
    ended, said = threading.Event(), threading.Lock()

    def give_up(reason: str) -> NoReturn:
        said.acquire()  # for ever: only one thread says why it gives up
        with contextlib.suppress(OSError, ValueError):
            print(f"warning: tracker={name} {reason}; the training is not affected", file=terminal, flush=True)
        os._exit(1)

    def watch() -> None:
        with contextlib.suppress(OSError):
            os.read(0, 1)  # until the launcher closes it, or dies
        ended.set()
        time.sleep(timeout_s)
        give_up(f"has not finished {timeout_s:g} s after the end of training (tracker.timeout_s)")

    threading.Thread(target=watch, daemon=True).start()
    try:
        follow(directory, name, ended)
    except BaseException as error:
        import traceback

        with contextlib.suppress(OSError, ValueError):
            traceback.print_exc()
        cause = error.__cause__ if isinstance(error, PlugInFailed) else error
        lines = str(cause).strip().splitlines()
        give_up(f"failed: {type(cause).__name__}: {lines[0] if lines else ''}".rstrip(": "))
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
