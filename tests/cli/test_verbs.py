"""run, verify and bench with real ranks, as a user starts them; the owner's 32-rank command among them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.launcher import run_launcher, run_to_end
from tests.cli.test_program import TINY


def only_run(directory: Path) -> Path:
    return (directory / "runs" / "latest").resolve(strict=True)


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def test_the_owners_command_runs_32_ranks_on_whatever_there_is(tmp_path: Path) -> None:
    small = ["model.layers=4", "model.hidden=32", "model.seq=16", "steps=2", "eval.batches=1"]
    small += ["global_batch=4", "microbatches=4", "checkpoint.last=false"]
    done = run_to_end("model=gpt", "strategy=ptdp", "tp=8", "pp=4", *small, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "as predicted, to the byte" in done.stdout and "32 ranks on" in done.stdout + done.stderr
    directory = only_run(tmp_path)
    summary, communication = read(directory / "summary.json"), read(directory / "comm.json")
    assert (summary["world"], summary["tp"], summary["pp"], summary["state"]) == (32, 8, 4, "done")
    assert summary["communication_as_predicted"] and {row["rank"] for row in communication["rows"]} == set(range(32))
    assert read(directory / "status.json")["exit_code"] == 0


def test_verify_proves_a_plan_and_writes_its_verdict(tmp_path: Path) -> None:
    done = run_to_end("verify", "strategy=ptdp", "tp=2", *TINY, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "verified: exact" in done.stdout
    verdict = read(only_run(tmp_path) / "verify.json")
    assert verdict["passed"] and verdict["precision"] == "fp64" and verdict["max_error"]["grads"] < 1e-10
    assert set(verdict["max_error"]) == {"initial", "loss", "grads", "grad_norm", "params", "val_loss"}


def test_a_difference_ends_with_4_and_is_shown(tmp_path: Path) -> None:
    """An impossible tolerance stands for a wrong plan: rounding alone breaks it. On warm ranks."""
    wanted = {"dp": 2, "verb": "verify", "verify.tolerance": 1e-30, "model.layers": 1}
    ended = run_launcher(tmp_path, overrides=wanted, worker="parallelrun.training.verify.run:run")
    assert ended.wait() == 4, ended.stderr
    assert "DIFFERS" in ended.stdout and not read(ended.directory / "verify.json")["passed"]
    status = ended.status
    assert (status["state"], status["exit_code"], status["failed_rank"]) == ("failed", 4, None)


def test_bench_writes_median_and_spread(tmp_path: Path) -> None:
    done = run_to_end("bench", "strategy=ddp", "dp=2", "bench.steps=4", "bench.warmup=1", *TINY, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    figures = read(only_run(tmp_path) / "bench.json")
    assert len(figures["step_times_s"]) == 4
    assert figures["min_s"] <= figures["lower_quartile_s"] <= figures["median_s"] <= figures["upper_quartile_s"]
    assert figures["predicted"] is None, "cluster=local has no rates"


SLOW = {"cluster.peak_tflops": 0.001, "cluster.memory_gb_s": 0.1, "cluster.intra_gb_s": 0.1, "cluster.step_us": 5e6}


@pytest.mark.parametrize(
    ("verb", "file", "measured"),
    [("bench", "bench.json", "median_s"), ("run", "summary.json", "step_time_median_s")],
)
def test_the_prediction_is_shown_beside_what_was_measured(verb, file, measured, tmp_path: Path) -> None:
    """Steps are predicted to take five seconds more than they do, by one constant."""
    wanted = {"dp": 2, "verb": verb, "bench.steps": 2, "bench.warmup": 1, **SLOW}
    ended = run_launcher(tmp_path, overrides=wanted, worker="parallelrun.launch.ranks.worker:run")
    assert ended.wait() == 0, ended.stderr
    found = read(ended.directory / file)
    predicted = found["predicted"]
    assert predicted["step_s"] == pytest.approx(sum(predicted["parts"].values())) and predicted["step_s"] > 5
    assert f"{1 - found[measured] / predicted['step_s']:.0%} shorter" in ended.stdout


def test_forked_ranks_start_from_the_resolved_configuration(tmp_path: Path) -> None:
    """`layout` is a shorthand: the lesson asks the layout's own keys on every rank, where it must be resolved."""
    done = run_to_end("model=matmul", "layout=2d", "tp=4", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "2D tensor parallel, SUMMA" in done.stdout
