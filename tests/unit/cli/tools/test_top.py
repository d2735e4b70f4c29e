"""`parallelrun top` draws what a run's records say, and stops when the run has ended."""

from __future__ import annotations

import io
import json
import os
import socket
import time

import pytest
from rich.console import Console

from parallelrun.cli.main import main
from parallelrun.cli.tools import top
from parallelrun.launch.host.directory import Status, utc_now
from parallelrun.launch.store.live import GatheredStatus, LiveFile
from parallelrun.launch.store.rendezvous import Member
from parallelrun.report.records.live import read_live
from parallelrun.report.runs.top import drawing


def rank(number, **more):
    row = {"rank": number, "pid": 1, "host": "node7", "step": 40, "phase": "step", "silent_s": 0.1, "step_s": 0.2}
    return {
        **row,
        "compute_s": 0.15,
        "waiting_s": 0.05,
        "memory_bytes": 3 * 2**20,
        "tokens_per_s": 5e4,
        "slow": 0.0,
        **more,
    }


@pytest.fixture
def run(tmp_path):
    directory = tmp_path / "runs" / "gpt-ddp-dp2" / "20261123T050508Z-509027"
    directory.mkdir(parents=True)
    (directory / "config.yaml").write_text("steps: 80\n")
    (directory / "metrics.jsonl").write_text(json.dumps({"step": 39, "loss": 2.5, "tokens_per_s": 5e4}) + "\n")
    return directory


def write(run, state="running", ranks=(), **more):
    fields = {"state": state, "step": 40, "pid": os.getpid(), "host": socket.gethostname(), "updated_utc": utc_now()}
    (run / "status.json").write_text(json.dumps({**fields, "ranks": list(ranks), **more}))


def text(run, width=150, height=40):
    console = Console(file=io.StringIO(), width=width)
    console.print(drawing(read_live(run), height))
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("config", "steps"),
    [
        ("verb: verify\nsteps: 60\nverify: {steps: 3}\n", 3),
        ("verb: bench\nsteps: 60\nbench: {warmup: 3, steps: 20}\n", 23),
        ("verb: run\nsteps: 60\nverify: {steps: 3}\n", 60),
        ("verb: run\n", 0),
    ],
)
def test_the_steps_are_those_of_the_verb(run, config, steps):
    (run / "config.yaml").write_text(config)
    assert read_live(run).steps == steps


def test_a_line_for_each_rank_with_its_shares_of_a_step(run):
    write(run, ranks=[rank(0), rank(1)])
    shown = text(run)
    assert "step 40/80" in shown and "loss 2.5000" in shown and "running" in shown
    (line,) = [line for line in shown.splitlines() if line.strip().startswith("1 ")]
    assert line.split() == ["1", "node7", "40", "step", "50,000", "200", "ms", "75%", "25%", "3", "MiB"]


def test_what_is_unusual_stands_beside_the_rank(run):
    write(run, ranks=[rank(0, step=37), rank(1, slow=1.6), rank(2, silent_s=31.0)])
    shown = text(run)
    assert (
        "3 steps behind" in shown and "computes 1.6 times as long as its like" in shown and "silent for 31 s" in shown
    )


def test_of_many_ranks_the_unusual_ones_are_shown_first(run):
    write(run, ranks=[rank(number, slow=2.0 if number == 97 else 0.0) for number in range(100)])
    shown = text(run, height=20)
    assert "computes 2.0 times" in shown and "more ranks, as expected" in shown and len(shown.splitlines()) <= 20


def test_the_end_of_a_run_is_shown_with_its_cause(run):
    write(run, "failed", exit_code=6, error="died: SIGKILL", failed_rank=3)
    shown = text(run)
    assert "failed (exit code 6)" in shown and "rank 3: died: SIGKILL" in shown


def test_a_run_whose_hosts_are_lost_is_silent_and_not_waited_for(run):
    write(run, host="elsewhere", updated_utc="2026-01-01T00:00:00Z")
    os.utime(run / "status.json", (0, 0))
    shown = text(run)
    assert "silent" in shown and "its hosts are lost" in shown and not read_live(run).is_live


def test_events_are_shown(run):
    write(run)
    event = {"event": "silent_data_corruption", "step": 30, "ranks": [1], "what": "memory: w changed", "undone_to": 20}
    (run / "events.jsonl").write_text(json.dumps(event) + "\n" + '{"event": "torn')
    assert "step 30: silent data corruption on rank 1: memory: w changed; undone to step 20" in text(run)


def test_without_a_terminal_it_prints_once(run, capsys):
    write(run, ranks=[rank(0)])
    assert main(["top", str(run)]) == 0 == main(["top", str(run), "--once"])
    assert capsys.readouterr().out.count("step 40/80") == 2


def test_json_is_one_document(run, capsys):
    write(run, ranks=[rank(0)])
    assert main(["top", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["state"], found["step"], found["steps"]) == ("running", 40, 80)
    assert found["status"]["ranks"][0]["host"] == "node7" and found["metrics"]["loss"] == 2.5


def test_on_a_terminal_it_draws_until_the_run_has_ended(run, monkeypatch):
    console = Console(file=io.StringIO(), width=120, height=30, force_terminal=True)
    monkeypatch.setattr("parallelrun.report.screen.open_console", lambda **options: console)
    write(run, ranks=[rank(0)])
    naps = []

    def sleep(seconds):
        naps.append(seconds)
        if len(naps) == 2:
            write(run, "done", exit_code=0)

    monkeypatch.setattr(top.time, "sleep", sleep)
    assert main(["top", str(run)]) == 0 and len(naps) == 2
    assert "(exit code 0)" in console.file.getvalue()


@pytest.mark.parametrize("words", [["nosuch"], ["--runs", "/nowhere", "latest"]], ids=" ".join)
def test_a_run_that_is_not_there_is_exit_2(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["top", *words]) == 2


def test_status_json_has_the_ranks_that_the_launcher_sees(tmp_path):
    status = Status(tmp_path)
    status.update(3, 0, lambda: [rank(0)])
    assert json.loads((tmp_path / "status.json").read_text())["ranks"][0]["rank"] == 0
    status.ended(0)
    assert "ranks" not in json.loads((tmp_path / "status.json").read_text())


def test_ranks_are_behind_one_another_and_not_behind_newer_records(run):
    (run / "metrics.jsonl").write_text(json.dumps({"step": 60, "loss": 2.5}) + "\n")
    write(run, ranks=[rank(0), rank(1)])
    assert "behind" not in text(run)


def test_every_rank_of_another_launcher_is_gathered_and_one_that_is_not_seen_is_named(run, monkeypatch):
    members = [Member(number, f"node{number}", 10 + number, "", {}, {}, "", "", True) for number in range(3)]
    (run / "logs").mkdir()
    other = LiveFile(run, 1, 3)
    other.update(40, 0, lambda: [rank(1)])
    gathered = GatheredStatus(run, members=members)
    gathered.update(40, 0, lambda: [rank(0)])
    shown = text(run)
    assert [one["rank"] for one in read_live(run).ranks] == [0, 1, 2]
    (line,) = [line for line in shown.splitlines() if line.strip().startswith("2 ")]
    assert "node2" in line and "not seen: nothing of it in the run directory" in line and "behind" not in shown
    now = time.monotonic() + 31
    monkeypatch.setattr("time.monotonic", lambda: now)
    gathered.update(41, 0, lambda: [rank(0)])  # rank 1 has written nothing since
    assert "silent for 31 s" in text(run)
    other.remove()
    assert not list((run / "logs").iterdir())
