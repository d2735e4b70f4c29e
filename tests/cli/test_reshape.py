"""`parallelrun reshape`: a live run changes its plan; bad requests are refused, and change nothing."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from parallelrun.cli.main import main
from parallelrun.launch.host.job import WORKER
from parallelrun.report.records import attempts, reshapes
from tests.cli.launcher import run_launcher, wait_for
from tests.matrix import FULL

LIVE = {"dp": 2, "steps": 100_000, "eval.every": 0, "precision.name": "fp64", "checkpoint.every": 5}
REFUSED = [
    (["dp=3"], "3"),
    (["world=4"], "this plan has 4 ranks, and the live run has 2"),
    (["tp=2", "model.hidden=64"], "model.hidden would make it another training"),
    (["servers=1", "dp=1", "strategy=ps"], "parameter servers"),
    ([], "no key says how the plan changes"),
]


def steps_of(directory):
    return [json.loads(line)["step"] for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_a_live_run_changes_its_plan_and_refuses_what_it_cannot(tmp_path, capsys):
    run = run_launcher(tmp_path, overrides=LIVE, worker="slowly")
    wait_for(lambda: (run.directory / "metrics.jsonl").exists() and steps_of(run.directory), "the first step")
    assert main(["reshape", str(run.directory), "tp=2"]) == 0
    assert "dp=2 -> tp=2" in capsys.readouterr().out
    for words, said in REFUSED:
        assert main(["reshape", str(run.directory), *words]) == 2, words
        assert said in capsys.readouterr().err
    assert not (run.directory / reshapes.REQUEST).exists()
    assert main(["reshape", str(run.directory), "pp=2", "schedule=gpipe"]) == 0
    last = reshapes.answers(run.directory)[-1]
    wait_for(lambda: steps_of(run.directory)[-1] > last["step"] + 6, "steps under the last plan")
    os.kill(run.pid, signal.SIGTERM)
    assert run.wait() == 75, run.stderr
    steps = steps_of(run.directory)
    assert steps == list(range(1, len(steps) + 1))
    summary = json.loads((run.directory / "summary.json").read_text())
    assert (summary["dp"], summary["tp"], summary["pp"], summary["reshapes"]) == (1, 1, 2, 2)
    assert summary["communication_as_predicted"]
    assert run.status["degrees"]["pp"] == 2 and run.status["reshaped_after_step"] == last["step"]
    assert main(["reshape", str(run.directory), "dp=2"]) == 2
    assert "is not live: its state is preempted" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["reshape", "nosuch", "dp=2"], ["reshape", "dp=2"]])
def test_without_a_run_there_is_nothing_to_change(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert "error:" in capsys.readouterr().err


@pytest.mark.skipif(not FULL, reason="--matrix=full")
def test_a_restart_goes_on_under_the_new_plan(tmp_path):
    run = run_launcher(tmp_path, overrides={**LIVE, "restarts": 3}, worker=WORKER)
    wait_for(lambda: (run.directory / "metrics.jsonl").exists() and steps_of(run.directory), "the first step")
    assert main(["reshape", str(run.directory), "tp=2"]) == 0
    changed = reshapes.answers(run.directory)[-1]["step"]
    wait_for(lambda: steps_of(run.directory)[-1] > changed + 12, "a checkpoint under the new plan")
    os.kill(rank_pid(run), signal.SIGKILL)
    wait_for(lambda: len(attempts.read(run.directory)) == 2 and attempts.read(run.directory)[1].stepping, "a restart")
    assert attempts.read(run.directory)[1].degrees["tp"] == 2
    os.kill(run.pid, signal.SIGTERM)
    assert run.wait() == 75, run.stderr
    steps = steps_of(run.directory)
    assert steps == list(range(1, len(steps) + 1))


def rank_pid(run) -> int:
    """A rank: a child of the launcher."""
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    return int(children[-1])
