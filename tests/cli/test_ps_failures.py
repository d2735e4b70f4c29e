"""A parameter server that loses a rank, with real launchers, workers and servers.

Async, ssp and backup workers go on without a lost worker if they can. Any other loss ends the run and names the rank.
Nothing hangs."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cli.launcher import Launched, read, run_launcher, survivors, wait_for
from tests.matrix import FULL

PS = {"strategy.name": "ps", "strategy.data.kind": "ps", "dp": 3, "global_batch": 12, "eval.every": 0}
ENDLESS = {"steps": 100_000}
SERVER = 3
SSP_PAIRS = {"strategy__data__consistency": "ssp", "tp": 2}  # the other rank of a killed worker ends, too
only_full = pytest.mark.skipif(not FULL, reason="another case loses the same: --matrix=full")


def launch(folder: Path, **overrides) -> Launched:
    wanted = {**PS, **{key.replace("__", "."): value for key, value in overrides.items()}}
    run = run_launcher(folder, overrides=wanted, worker="tests.cli.ps_worker:run")
    return replace(run, world=wanted["dp"] * wanted.get("tp", 1) + wanted.get("strategy.data.servers", 1))


def all_reach(run: Launched, step: int) -> None:
    for rank in range(run.world):
        note = run.directory / f"at_{rank}"
        wait_for(lambda note=note: int(read(note) or 0) >= step, f"step {step} of {note.name}\n{run.stderr}")


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param({"strategy__data__consistency": "async"}, marks=only_full),
        {**SSP_PAIRS, "strategy__data__staleness": 1, "strategy__data__servers": 2},
        {"strategy__data__backup_workers": 1},
    ],
    ids=["async", "ssp", "backup"],
)
def test_the_run_goes_on_without_a_killed_worker(tmp_path, overrides):
    run = launch(tmp_path, steps=24, strategy__data__delays=[0.06, 0.06, 0.06], checkpoint__last=True, **overrides)
    all_reach(run, 4)
    ranks = overrides.get("tp", 1)
    os.kill(run.rank_pids()[3 * ranks - 1], signal.SIGKILL)  # of worker 2
    assert run.wait() == 0, run.stderr
    assert f"warning: rank {3 * ranks - 1} died: SIGKILL" in run.stderr and "continuing with 2 workers" in run.stderr
    assert run.status["state"] == "done"
    summary = json.loads((run.directory / "summary.json").read_text())
    assert (summary["lost_workers"], summary["steps"]) == (1, 24)
    assert (run.directory / "checkpoints" / "step_24" / "index.json").exists()
    log = [json.loads(line) for line in (run.directory / "apply_log.jsonl").read_text().splitlines()]
    last = {push["worker"]: push["clock"] for row in log if row["kind"] == "update" for push in row["pushes"]}
    assert last[0] == last[1] == 24 and last.get(2, 0) < 24  # as a backup, its pushes may all have come too late
    assert not survivors(run.rank_pids(), 5)


@pytest.mark.parametrize(
    ("victim", "overrides"),
    [
        (2, {}),
        (0, {"strategy__data__consistency": "async"}),  # worker 0 writes the records and is never spare
        pytest.param(1, {"dp": 1, "tp": 2, "strategy__data__consistency": "async"}, marks=only_full),  # a rank of it
        (SERVER, {}),
        pytest.param(SERVER, {"strategy__data__consistency": "async"}, marks=only_full),
        (SERVER + 1, {"strategy__data__servers": 2}),
    ],
    ids=[
        "a worker of sync",
        "worker 0 of async",
        "a rank of worker 0",
        "the server of sync",
        "the server of async",
        "the second server",
    ],
)
def test_a_lost_rank_that_cannot_be_spared_ends_the_run_and_is_named(tmp_path, victim, overrides):
    run = launch(tmp_path, **ENDLESS, **overrides)
    all_reach(run, 3)
    pids = run.rank_pids()
    os.kill(pids[victim], signal.SIGKILL)
    assert run.wait() == 6, run.stderr
    assert (run.status["state"], run.status["failed_rank"]) == ("failed", victim)
    own = f"dp=0 tp={victim} pp=0" if "tp" in overrides else f"dp={victim} tp=0 pp=0"
    role = "server" if victim >= SERVER else own
    assert f"error: rank {victim} ({role}" in run.stderr and "died: SIGKILL" in run.stderr
    assert not survivors([*pids, run.pid], 5)


def test_losing_more_workers_than_there_are_backups_ends_the_run(tmp_path):
    run = launch(tmp_path, **ENDLESS, strategy__data__backup_workers=1)
    all_reach(run, 3)
    os.kill(run.rank_pids()[1], signal.SIGKILL)
    wait_for(lambda: "continuing with" in run.stderr, "the warning")
    os.kill(run.rank_pids()[2], signal.SIGKILL)
    assert run.wait() == 6, run.stderr
    assert run.status["failed_rank"] == 2


@pytest.mark.parametrize("consistency", ["sync", "async"] if FULL else ["async"])
def test_a_stopped_run_saves_and_can_be_resumed(tmp_path, consistency):
    run = launch(tmp_path, **ENDLESS, strategy__data__consistency=consistency)
    all_reach(run, 3)
    os.kill(run.pid, signal.SIGTERM)
    assert run.wait() == 75, run.stderr
    assert run.status["state"] == "preempted"
    (saved,) = (run.directory / "checkpoints").glob("step_*")
    extra = json.loads((saved / "index.json").read_text())["extra"]
    assert extra["step"] == min(extra["clocks"]) >= 3
    again = launch(
        tmp_path / "again", steps=extra["step"] + 3, resume=str(saved), strategy__data__consistency=consistency
    )
    assert again.wait() == 0, again.stderr
