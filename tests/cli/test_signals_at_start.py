"""Signals inside the hooks of the launcher's forks, where Python drops what a handler raises: none is lost.

The first fork starts the guard of the status, the next ones the ranks.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.cli.launcher import run_to_end

ENDLESS = ("model=gpt", "model.layers=2", "model.hidden=16", "model.heads=2", "model.seq=8", "dataset=synthetic",
           "global_batch=4", "eval.every=0", "steps=1000000")  # fmt: skip
SHAPES = {"inline": ("strategy=single",), "ranks": ("strategy=ddp", "dp=2"), "restarts": ("dp=2", "restarts=2")}
TERM, USR1, INT = signal.SIGTERM, signal.SIGUSR1, signal.SIGINT
PREEMPTED, INTERRUPTED, TERMINATED = (75, "preempted"), (130, "interrupted"), (143, "interrupted")


def run(folder: Path, shape: str, hook: str, fork: int, *signals: int):
    """Return the exit code, the final state (None: no status was written), and what was printed."""
    wish = json.dumps({"hook": hook, "fork": fork, "signals": signals})
    words = (*ENDLESS, *SHAPES[shape], f"runs={folder}/runs")
    done = run_to_end(*words, cwd=folder, function="tests.cli.signalled:main", PARALLELRUN_TEST=wish)
    status = next(folder.glob("runs/*/*/status.json"), None)
    return done.returncode, json.loads(status.read_text())["state"] if status else None, done.stderr


@pytest.mark.parametrize(
    ("shape", "hook", "signals", "code"),
    [
        ("ranks", "before", (TERM,), 143),
        ("ranks", "after_in_parent", (TERM,), 143),
        ("ranks", "after_in_parent", (TERM, TERM), 143),
        ("restarts", "after_in_parent", (USR1,), 143),
        ("inline", "after_in_parent", (INT,), 130),
    ],
)
def test_signals_before_the_ranks_end_the_run(tmp_path, shape, hook, signals, code):
    ended, state, printed = run(tmp_path, shape, hook, 1, *signals)
    assert (ended, state) == (code, None), printed
    assert "Exception ignored" not in printed and "Traceback" not in printed


@pytest.mark.parametrize(
    ("shape", "fork", "signals", "expected"),
    [
        ("ranks", 2, (TERM,), PREEMPTED),
        ("ranks", 3, (TERM, USR1), TERMINATED),
        ("restarts", 3, (INT,), INTERRUPTED),
    ],
)
def test_signals_while_the_ranks_are_forked_reach_them(tmp_path, shape, fork, signals, expected):
    ended, state, printed = run(tmp_path, shape, "after_in_parent", fork, *signals)
    assert (ended, state) == expected, printed
    assert "Exception ignored" not in printed and "Traceback" not in printed
