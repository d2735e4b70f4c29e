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
    ("shape", "hook", "fork", "signals", "expected"),
    [
        ("ranks", "before", 1, (TERM,), (143, None)),
        ("ranks", "after_in_parent", 1, (TERM,), (143, None)),
        ("ranks", "after_in_parent", 1, (TERM, TERM), (143, None)),
        ("restarts", "after_in_parent", 1, (USR1,), (143, None)),
        ("inline", "after_in_parent", 1, (INT,), (130, None)),
        ("ranks", "after_in_parent", 2, (TERM,), PREEMPTED),
        ("ranks", "after_in_parent", 3, (TERM, USR1), TERMINATED),
        ("restarts", "after_in_parent", 3, (INT,), INTERRUPTED),
    ],
)
def test_signals_in_the_hooks_of_a_fork_end_the_run(tmp_path, shape, hook, fork, signals, expected):
    ended, state, printed = run(tmp_path, shape, hook, fork, *signals)
    assert (ended, state) == expected, printed
    assert "Exception ignored" not in printed and "Traceback" not in printed
