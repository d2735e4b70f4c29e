"""Runs that torchrun starts again: found by the torchrun that started them, continued or refused."""

from __future__ import annotations

import io
import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from parallelrun.base.errors import EXIT_NO_PROGRESS, ParallelrunError
from parallelrun.launch.entry import attach, reattach
from parallelrun.launch.failures import failure, reach
from parallelrun.launch.host.directory import Status
from parallelrun.launch.host.environment import Attached
from parallelrun.launch.host.heartbeat import HeartbeatFile
from parallelrun.launch.host.job import Job
from parallelrun.planner.resolve.freeze import filled, freeze
from parallelrun.planner.resolve.resolve_config import resolve
from parallelrun.report.records import attempts
from tests.plans import tiny_config


@pytest.fixture(autouse=True)
def under_torchrun(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")


def a_run(runs: Path, name="20261123T000000Z-aaaaaa", **overrides) -> Job:
    """A run whose ranks have just been ended, after 7 steps."""
    config = tiny_config({"dp": 4, "runs": str(runs), "steps": 9, **overrides})
    plan = resolve(config)
    directory = runs / "gpt" / name
    (directory / "logs").mkdir(parents=True)
    job = Job(filled(config, plan), plan, directory)
    job.config_file.write_text(freeze(config, plan))
    (directory / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in range(1, 8)))
    Status(directory).running()
    reattach.remember(job)
    return job


def test_the_run_of_the_same_torchrun_goes_on(tmp_path):
    job = a_run(tmp_path)
    Status(job.directory, 7).ended(6, "died: SIGKILL", 2)
    assert reattach.earlier(tmp_path) == job.directory
    after = reattach.continued(replace(job, directory=Path()), job.directory)
    assert (after.directory, after.attempt, after.config.resume) == (job.directory, 2, None)
    first, second = attempts.read(job.directory)
    assert (first.rank, first.error, first.exit_code, first.step) == (2, "died: SIGKILL", 6, 7)
    assert (second.number, second.world, second.resumed_step) == (2, 4, 0)
    assert after.config_file.exists() and not (job.directory / "metrics.jsonl").read_text()


def test_runs_of_others_and_finished_ones_are_not_continued(tmp_path, monkeypatch):
    job = a_run(tmp_path)
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert reattach.earlier(tmp_path) is None
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert reattach.earlier(tmp_path) is None  # all jobs without a name have the same one
    (job.directory / reattach.FILE).write_text(json.dumps({"run_id": "mine", "agent": "elsewhere"}))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
    assert reattach.earlier(tmp_path) == job.directory  # another node of the job
    Status(job.directory).ended(0)
    assert reattach.earlier(tmp_path) is None
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    assert reattach.earlier(tmp_path) is None


def test_what_must_not_be_restarted_ends_with_its_code(tmp_path):
    job = a_run(tmp_path)
    Status(job.directory, 7).ended(5, "loss is nan", 0)
    with pytest.raises(ParallelrunError, match="same numbers") as caught:
        reattach.continued(job, job.directory)
    assert caught.value.exit_code == 5


def test_no_progress_ends_with_its_code_under_torchrun_too(tmp_path):
    job = a_run(tmp_path)
    history = [replace(attempts.read(job.directory)[0], number=n, step=7, exit_code=6, rank=n % 2) for n in range(1, 5)]
    attempts.write(job.directory, history)
    with pytest.raises(ParallelrunError) as caught:
        reattach.continued(job, job.directory)
    assert caught.value.exit_code == EXIT_NO_PROGRESS


def test_fewer_ranks_get_a_plan_that_fits_if_the_run_is_elastic(tmp_path):
    more = {"restarts": 1, "elastic": True}
    job = a_run(tmp_path, **more)
    asked = tiny_config({"dp": 4, "runs": str(tmp_path), "steps": 9, **more})
    same = reattach.planned(asked, 4)
    assert same is not None and same[1].degrees == job.plan.degrees
    smaller = reattach.planned(asked, 2)
    assert smaller is not None and smaller[1].degrees["dp"] == 2
    assert smaller[1].batch.global_batch == job.plan.batch.global_batch
    assert reattach.planned(replace(asked, elastic=False), 2) is None
    assert reattach.planned(replace(asked, runs=str(tmp_path / "none")), 4) is None


def test_a_rank_that_was_cut_off_writes_nothing_into_the_run_that_goes_on(tmp_path):
    job, screen = a_run(tmp_path), io.StringIO()
    peers = SimpleNamespace(lost=tuple, must_report=lambda own, asked: True, cause=lambda own: own,
                            members=(), positions=lambda own: {})  # fmt: skip
    attached = Attached(1, 4, 1, "127.0.0.1", 1, "torchrun", "job")
    own = failure.Failure(1, "lost a peer", 6)
    (first,) = attempts.read(job.directory)
    attempts.write(job.directory, [first, replace(first, number=2)])
    assert attach._reporter(attached, job, screen, peers, lambda: None, HeartbeatFile(1))(own) == 6
    assert not screen.getvalue() and failure.read_failure(job.directory, 1) is None
    assert json.loads((job.directory / "status.json").read_text())["state"] == "running"
    assert attach._reporter(attached, replace(job, attempt=2), screen, peers, lambda: None, HeartbeatFile(1))(own) == 6
    assert json.loads((job.directory / "status.json").read_text())["state"] == "failed"


def test_a_rank_that_lost_its_peers_blames_the_host_that_the_launcher_has_lost(tmp_path):
    job, screen = a_run(tmp_path), io.StringIO()
    own = replace(failure.of_exception(RuntimeError("Connection closed by peer"), 1, 5), rank=1)
    assert own.order, "the failure of a victim"
    peers = SimpleNamespace(lost=tuple, must_report=lambda own, asked: True, cause=lambda own: replace(own, rank=3),
                            members=(), positions=lambda own: {})  # fmt: skip
    attached = Attached(1, 4, 1, "127.0.0.1", 1, "parallelrun", "job")
    lost = failure.Failure(2, "the connection to host worker-2 (ranks 2 to 3) was lost", 6)
    attach._reporter(attached, job, screen, peers, lambda: lost, HeartbeatFile(1))(own)
    status = json.loads((job.directory / "status.json").read_text())
    assert (status["failed_rank"], status["error"]) == (2, lost.what)


@pytest.mark.parametrize(("host", "source"), [("worker-2", "torchrun"), ("here", "torchrun"), ("worker-2", "mpirun")])
def test_who_is_told_of_a_lost_host_writes_the_end_and_waits_for_those_who_know_better(
    tmp_path, monkeypatch, host, source
):
    """Ranks of the lost host go last; mpirun must notice the cut before its ranks exit."""
    job, waits = a_run(tmp_path), []
    here = os.uname().nodename
    lost = failure.Failure(2, "lost the connection", 6, host=here if host == "here" else host)
    peers = SimpleNamespace(wait_recorded=lambda: waits.append("others"), is_first_to_report=lambda: True)
    monkeypatch.setattr(attach.time, "sleep", waits.append)
    attached = Attached(1, 4, 1, "127.0.0.1", 1, source, "job")
    attach._conclude_loss(attached, job, io.StringIO(), peers, lambda own: pytest.fail("its own failure"), lost)
    assert waits == (["others"] if host == "here" else [20.0] if source == "mpirun" else [])
    status = json.loads((job.directory / "status.json").read_text())
    assert (status["state"], status["failed_rank"]) == ("failed", 2)


def test_a_rank_without_its_launcher_reports_its_own_failure(tmp_path):
    job, told = a_run(tmp_path), []
    own = failure.Failure(1, reach.LAUNCHER_LOST, 6)
    attached = Attached(1, 4, 1, "127.0.0.1", 1, "mpirun", "job")
    attach._conclude_loss(attached, job, io.StringIO(), SimpleNamespace(), told.append, own)
    assert told == [own]
