"""Runs that fail and are restarted end as the run that never failed: the same bits, every step recorded once.

Real launchers and real trainings of a tiny model (`benchmarks.fault_injection`).
"""

from __future__ import annotations

import json
import os
import signal

import pytest

from benchmarks.fault_injection import WORKER, Fault, variable
from parallelrun.base.errors import EXIT_NO_PROGRESS
from parallelrun.checkpoint.find import latest
from parallelrun.report.records import attempts
from tests.checkpoints import read_whole, same
from tests.cli.launcher import Launched, run_launcher, run_torchrun, survivors, wait_for
from tests.matrix import FULL

STEPS = 9
SMALL = {
    "model.layers": 2,
    "dropout": 0.1,
    "steps": STEPS,
    "eval.every": 4,
    "checkpoint.every": 3,
    "checkpoint.keep": 3,
}
TWO = {"dp": 2}
OTHERS = [
    pytest.param({"dp": 2, "servers": 1, "strategy.data.kind": "ps"}, [Fault("kill", 1, 8)], id="ps"),
    pytest.param({**TWO, "strategy.data.kind": "zero1"}, [Fault("torn file", 0, 8)], id="zero1-torn-file"),
    pytest.param({"pp": 2}, [Fault("kill", 1, 8), Fault("kill", 0, 8, 2)], id="pp"),
]


def train(folder, plan, faults=(), restarts=3, timeout_s=20.0, **more) -> Launched:
    """A launcher of the tiny training with planted faults."""
    overrides = {**SMALL, **plan, "restarts": restarts, **more}
    return run_launcher(folder, overrides=overrides, worker=WORKER, timeout_s=timeout_s, environ=variable(faults))


def losses(run: Launched) -> dict[int, tuple[float, float | None, float]]:
    """Loss, validation loss and norm by step. No step is there twice."""
    rows = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert [row["time_s"] for row in rows] == sorted(row["time_s"] for row in rows)
    return {row["step"]: (row["loss"], row.get("val_loss"), row["grad_norm"]) for row in rows}


def weights(run: Launched):
    return read_whole(latest(run.directory))


@pytest.mark.parametrize(
    ("plan", "faults"),
    [
        pytest.param(
            {"dp": 2, "tp": 2} if FULL else {"tp": 2},
            [Fault("kill", 3 if FULL else 1, 5, 1, 0.003), Fault("exception", 0, 4, 2), Fault("segfault", 1, 8, 3)],
            id="ptdp",
        ),
        pytest.param({**TWO, "strategy.data.kind": "fsdp"}, [Fault("flipped bit", 1, 8)], id="fsdp-flipped-bit"),
        *(OTHERS if FULL else OTHERS[:1]),
    ],
)
def test_a_run_that_fails_ends_with_the_bits_of_one_that_does_not(plan, faults, tmp_path):
    whole, failing = (train(tmp_path / name, plan, planted) for name, planted in (("a", ()), ("b", faults)))
    assert (whole.wait(), failing.wait()) == (0, 0), failing.stderr
    assert losses(whole) == losses(failing) and len(losses(whole)) == STEPS
    assert same(weights(whole), weights(failing))
    history = attempts.read(failing.directory)
    assert [(one.rank, bool(one.error)) for one in history[: len(faults)]] == [(one.rank, True) for one in faults]
    summaries = [json.loads((run.directory / "summary.json").read_text()) for run in (whole, failing)]
    assert summaries[1]["repeated_steps"] > 0 and summaries[1]["restart_lost_s"] > 0
    assert [one["first_loss"] for one in summaries] == [losses(whole)[1][0]] * 2
    assert "restarts" not in summaries[0] and failing.status["last_failure"]["rank"] == history[-2].rank
    assert f"attempt {len(history) - 1} of 4 has failed; attempt {len(history)} goes on" in failing.stderr


def test_a_rank_that_cannot_be_replaced_is_left_out_and_the_plan_shrinks(tmp_path):
    """Saves are complete when a rank dies: a checkpoint that only the second attempt has would be progress."""
    faults = [Fault("kill", 1, 5, 1), Fault("kill", 1, 5, 2)]
    settings = {"precision.name": "fp64", "checkpoint.asynchronous": False}
    whole = train(tmp_path / "a", TWO, **settings)
    run = train(tmp_path / "b", TWO, faults, elastic=True, **settings)
    assert (whole.wait(), run.wait()) == (0, 0), run.stderr
    assert "elastic: the plan changes from 2 ranks" in run.stderr
    assert [one.world for one in attempts.read(run.directory)] == [2, 2, 1]
    assert json.loads((run.directory / "attempts" / "3" / "plan.json").read_text())["world"] == 1
    found, expected = losses(run), losses(whole)
    assert found.keys() == expected.keys()
    assert [loss for loss, _, _ in found.values()] == pytest.approx([one[0] for one in expected.values()], rel=1e-12)


def test_a_rank_that_hangs_is_replaced(tmp_path):
    run = train(tmp_path, TWO, [Fault("stop", 1, 5)], timeout_s=4.0, **{"eval.every": 0})
    assert run.wait() == 0, run.stderr
    assert len(losses(run)) == STEPS
    (first, _) = attempts.read(run.directory)
    assert (first.rank, first.exit_code) == (1, 7)


def test_no_progress_ends_it_with_a_code_of_its_own_and_without_checkpoints_it_begins_again(tmp_path):
    faults = [Fault("kill", number % 2, 4, number) for number in range(1, 6)]
    run = train(tmp_path, TWO, faults, restarts=9, **{"checkpoint.every": 0})
    assert run.wait() == EXIT_NO_PROGRESS
    assert "  not restarted: no progress in 3 attempts: step 3 was not passed" in run.stderr
    assert "goes on from step 0: nothing was saved; 3 steps again" in run.stderr
    assert "note: restarts=9 without checkpoint.every" in run.stderr
    assert len(attempts.read(run.directory)) == 4 and run.status["state"] == "failed"


def test_a_failure_after_the_last_save_is_repaired_without_another_step(tmp_path):
    run = train(tmp_path, {"pp": 2}, [Fault("late kill", 1, STEPS)])
    assert run.wait() == 0, run.stderr
    assert len(losses(run)) == STEPS
    assert [one.resumed_step for one in attempts.read(run.directory)] == [0, STEPS]


def test_a_signal_ends_a_restarted_run_as_any_other(tmp_path):
    run = train(tmp_path, TWO, [Fault("kill", 0, 5)], steps=100_000)
    wait_for(lambda: len(attempts.read(run.directory)) == 2 and attempts.read(run.directory)[1].stepping, "restart")
    os.kill(run.pid, signal.SIGTERM)
    assert run.wait() == 75, run.stderr
    assert run.status["state"] == "preempted" and "resume with:" in run.stderr
    assert not survivors([run.pid], 5)


@pytest.mark.skipif(not FULL, reason="two starts of two programs: --matrix=full")
def test_what_torchrun_starts_again_goes_on_with_the_same_bits(tmp_path):
    wanted = {"overrides": {**SMALL, **TWO}, "runs": str(tmp_path / "b" / "runs"), "worker": WORKER}
    words = ("--max-restarts", "2", "-m", "tests.cli.attached", json.dumps(wanted))
    whole = train(tmp_path / "a", TWO)
    run = run_torchrun(tmp_path / "b" / "process", *words, **variable([Fault("kill", 1, 8)]))
    assert (whole.wait(), run.wait()) == (0, 0), run.stderr
    assert losses(whole) == losses(run) and same(weights(whole), weights(run))
    assert [one.rank for one in attempts.read(run.directory)] == [1, None]
