"""Ranks that torchrun and mpirun have started: one run, one voice, one exit code.

One start under each real launcher (torchrun's ranks import everything anew with --matrix=full); the endings on warm
processes that carry mpirun's variables. (srun's mapping: tests/unit/launch/host/test_environment.py.)
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli import stand_in
from tests.cli.launcher import read, request, run_attached, run_torchrun, survivors, wait_for
from tests.matrix import FULL

MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", sys.executable, stand_in.__file__]
TINY = "model=gpt strategy=ddp dp=2 steps=2 dataset=synthetic model.layers=1 model.hidden=16 model.seq=8 eval.batches=1"
ENDLESS = {"steps": 100_000}
needs_mpirun = pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun here (openmpi-bin)")


def by_torchrun(folder: Path, words: list[str]) -> tuple[int, str, str]:
    """The exit code of torchrun, and what it has printed on stdout and stderr."""
    job = run_torchrun(folder / "job", *(("-m", "parallelrun", *words) if FULL else (stand_in.__file__, str(folder))))
    if not FULL:
        carry_out(folder, words)
    return job.wait(), job.stdout, job.stderr


def by_mpirun(folder: Path, words: list[str]) -> tuple[int, str, str]:
    """With ranks of warm processes, which are given the variables that mpirun has set."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*MPIRUN, str(folder)], cwd=folder, **streams) as mpirun:
        carry_out(folder, words)
        stdout, stderr = mpirun.communicate(timeout=150)
    return mpirun.returncode, stdout, stderr


def carry_out(folder: Path, words: list[str]) -> None:
    """Let warm processes be the two ranks of which stand-ins have told the variables."""
    for place in [folder / f"process_{rank}" for rank in range(2)]:
        environ = json.loads(wait_for(lambda place=place: read(place / "environ.json"), "a stand-in"))
        request("tests.cli.launcher:program", place, words, environ)


@pytest.mark.parametrize("launcher", [by_torchrun, pytest.param(by_mpirun, marks=needs_mpirun)])
def test_the_ranks_of_another_launcher_make_one_run(tmp_path, launcher):
    code, stdout, stderr = launcher(tmp_path, [*TINY.split(), f"runs={tmp_path / 'runs'}"])
    assert code == 0, stdout + stderr
    (group,) = [path for path in (tmp_path / "runs").iterdir() if not path.is_symlink()]
    (directory,) = group.iterdir()
    status = json.loads((directory / "status.json").read_text())
    assert (status["state"], status["step"]) == ("done", 2)
    assert len((directory / "metrics.jsonl").read_text().splitlines()) == 2
    assert stdout.count("step 2/2") == 1  # rank 0 alone has the terminal
    assert read(directory / "logs" / "rank_1.log") == ""
    manifest = json.loads((directory / "manifest.json").read_text())
    assert manifest["hosts"] == [os.uname().nodename]


def codes(ranks) -> list[int]:
    return [rank.wait() for rank in ranks]


@pytest.mark.parametrize(
    ("overrides", "said"), [({"dp": 3}, "error:"), ({"dp": 2, "tp": 2}, "mpirun started 2 ranks, the plan has 4")]
)
def test_when_rank_0_refuses_the_plan_or_its_world_all_leave_with_its_code(tmp_path, overrides, said):
    ranks = run_attached(tmp_path, overrides=overrides)
    assert codes(ranks) == [2, 2]
    assert said in ranks[0].stderr and ranks[1].stderr == ""
    assert not (tmp_path / "runs").exists()


def test_ranks_with_other_code_or_another_command_line_are_refused_and_named(tmp_path):
    other_words = {"1": ["steps=5", "model.layers=3", "optimizer.lr=0.5"]}
    ranks = run_attached(tmp_path, words=other_words, **{"foreign code": 1})
    assert codes(ranks) == [3, 3]
    code = r"code of rank 1 on \S+ differs from rank 0's: ffffffffffff, version .* \(rank 0: \w+, version"
    assert re.search(code, ranks[0].stderr)
    words = "model.layers=3 (rank 0: not given), optimizer.lr=0.5 (rank 0: not given)"
    assert f"differs from rank 0's: {words}" in ranks[0].stderr
    assert (ranks[0].status["state"], ranks[0].status["exit_code"]) == ("failed", 3)
    assert not list(ranks[0].directory.glob("started_*"))  # no rank has begun


@pytest.mark.parametrize("culprit", [0, 1])
def test_the_rank_that_raises_tells_and_rank_0_writes_it_down(tmp_path, culprit):
    ranks = run_attached(tmp_path, {**ENDLESS, "rank": culprit, "do": "raise"})
    assert codes(ranks) == [6, 6]
    words = rf"error: rank {culprit} \(dp={culprit} tp=0 pp=0, \S+ pid \d+\): ValueError: the culprit speaks"
    assert re.search(words, ranks[0].stderr) and re.search(words, ranks[culprit].stderr)
    assert (ranks[0].status["failed_rank"], ranks[0].status["exit_code"]) == (culprit, 6)
    assert "in misbehave" in ranks[0].log(culprit)


def test_a_killed_rank_ends_the_others_with_6(tmp_path):
    ranks = run_attached(tmp_path, ENDLESS)
    ranks[0].reaches(2)
    os.kill(ranks[1].pid, signal.SIGKILL)
    assert codes(ranks) == [6, -9]
    assert (ranks[0].status["state"], ranks[0].status["failed_rank"]) == ("failed", 1)
    assert re.search(rf"error: rank 1 \(dp=1 .* pid {ranks[1].pid}\) died: ", ranks[0].stderr)


def test_when_rank_0_is_killed_the_lowest_rank_that_is_left_writes_it_down(tmp_path):
    ranks = run_attached(tmp_path, ENDLESS, world=3, overrides={"dp": 3, "global_batch": 9})
    ranks[0].reaches(2)
    os.kill(ranks[0].pid, signal.SIGKILL)
    assert codes(ranks) == [-9, 6, 6]
    status = ranks[0].status
    assert (status["state"], status["exit_code"], status["failed_rank"]) == ("failed", 6, 0)
    assert status["error"].startswith("died: ") and status["step"] >= 2 and status["pid"] == ranks[1].pid
    assert re.search(rf"error: rank 0 \(dp=0 .* pid {ranks[0].pid}\) died: ", ranks[1].stderr)
    assert "died" not in ranks[2].stderr  # one voice


def test_a_rank_that_waits_for_a_dead_rank_0_for_ever_still_writes_it_down(tmp_path):
    """As under NCCL, where the survivors' collectives do not fail: here rank 1 sleeps."""
    ranks = run_attached(tmp_path, {**ENDLESS, "rank": 1, "do": "sleep"})
    ranks[1].reaches(3)  # from where it sleeps: earlier, it would be in a collective, which fails
    os.kill(ranks[0].pid, signal.SIGKILL)
    wait_for(lambda: ranks[1].status["state"] == "failed", "the survivor's word")
    assert (ranks[1].status["failed_rank"], ranks[1].status["exit_code"]) == (0, 6)
    os.kill(ranks[1].pid, signal.SIGKILL)


def test_torchrun_s_rank_0_is_killed(tmp_path):
    argument = json.dumps({"overrides": {"dp": 2}, "runs": str(tmp_path / "runs")})
    job = run_torchrun(tmp_path / "job", "-m", "tests.cli.attached", argument, PARALLELRUN_TEST=json.dumps(ENDLESS))
    at = wait_for(lambda: next((tmp_path / "runs").glob("gpt*/*/at_0"), None), f"the first step\n{job.stderr}")
    os.kill(int(read(at.with_name("started_0"))), signal.SIGKILL)
    assert job.wait() == 1  # torchrun's own code for everything
    status = json.loads((at.parent / "status.json").read_text())
    assert (status["state"], status["failed_rank"], status["exit_code"]) == ("failed", 0, 6), job.stdout + job.stderr


def test_sigterm_to_one_rank_stops_all_after_the_same_step(tmp_path):
    ranks = run_attached(tmp_path, ENDLESS)
    ranks[0].reaches(2)
    os.kill(ranks[1].pid, signal.SIGTERM)
    assert codes(ranks) == [75, 75]
    assert ranks[0].status["state"] == "preempted"
    assert ranks[0].fact("at", 0) == ranks[0].fact("at", 1)
    saved = f"{ranks[0].directory}/checkpoints/step_{ranks[0].fact('at', 0)}"
    assert f"resume with: parallelrun dp=2 resume={saved}" in ranks[0].stderr


def test_a_rank_whose_code_is_settled_ignores_the_scheduler_s_signals(tmp_path):
    """`srun --kill-on-bad-exit` sends SIGTERM to all ranks as soon as the first has exited."""
    ranks = run_attached(tmp_path, **{"signalled at its end": True})
    assert codes(ranks) == [0, 0], ranks[0].stderr
    assert ranks[0].status["state"] == "done"


def test_a_rank_that_fails_says_how_to_go_on_with_the_overrides_of_rank_0(tmp_path):
    ranks = run_attached(tmp_path, {**ENDLESS, "rank": 1, "step": 30, "do": "raise", "pause": 0.05})
    saved = ranks[0].directory / "checkpoints" / "step_2"
    saved.mkdir(parents=True)
    assert codes(ranks) == [6, 6]
    assert f"resume with: parallelrun dp=2 resume={saved}" in ranks[1].stderr


def test_ctrl_c_is_130_without_a_stack(tmp_path):
    ranks = run_attached(tmp_path, ENDLESS)
    ranks[0].reaches(2)
    for rank in ranks:
        os.kill(rank.pid, signal.SIGINT)
    assert codes(ranks)[0] == 130, ranks[0].stderr
    assert "Traceback" not in "".join(rank.stdout + rank.stderr for rank in ranks)
    assert not survivors([rank.pid for rank in ranks], 2.0)


def test_a_hang_ends_with_7_and_names_the_rank_that_does_not_come(tmp_path):
    asleep = run_attached(tmp_path / "a", {**ENDLESS, "rank": 1, "do": "sleep"}, timeout_s=4)
    stopped = run_attached(tmp_path / "b", ENDLESS, timeout_s=4)
    stopped[0].reaches(2)
    os.kill(stopped[1].pid, signal.SIGSTOP)
    assert codes(asleep) == [7, 7]
    assert 4 < asleep[0].noticed_after(1) < 24
    assert "in misbehave" in asleep[0].log(1) and "in all_reduce" in asleep[0].log(0)
    assert (asleep[0].status["failed_rank"], asleep[0].status["exit_code"]) == (1, 7)
    assert re.search(
        r"error: rank 1 .* hangs: no progress for 4 s; sleeps in misbehave .*not come to all_reduce 3", asleep[0].stderr
    )
    assert asleep[0].stderr.count("error: rank 1") == 1 and "error:" not in asleep[1].stderr  # one voice
    assert stopped[0].wait() == 7
    assert stopped[1].wait() == -signal.SIGKILL  # its launcher need not wait for it
    assert stopped[0].status["failed_rank"] == 1
    (missing,) = stopped[0].status["stall"]["missing"]
    assert (missing["rank"], missing["activity"].partition(",")[0]) == (1, "is stopped (SIGSTOP)")


def test_ranks_that_do_not_come_are_named(tmp_path):
    ranks = run_attached(tmp_path, world=3, overrides={"dp": 3, "global_batch": 9}, absent=2, patience=2)
    assert codes(ranks)[:2] == [7, 7]
    assert "joined 2 of 3 ranks in 2 s; missing: 2" in ranks[0].stderr


def test_the_note_of_rank_0_is_gone_afterwards(tmp_path):
    from parallelrun.launch.host.environment import Attached
    from parallelrun.launch.store import stores

    ranks = run_attached(tmp_path)
    assert codes(ranks) == [0, 0], ranks[0].stderr
    assert not stores._note(Attached(0, 2, 0, "127.0.0.1", 0, "mpirun", str(tmp_path))).exists()
    assert Path(ranks[0].directory / "config.yaml").exists()
