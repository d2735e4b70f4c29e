"""The batch file of Slurm: what it asks for, what it runs, and what it refuses to ask for."""

from __future__ import annotations

import shlex
import subprocess
from dataclasses import replace

import pytest

from parallelrun.launch.job_files.slurm import SlurmJob

GPUS = SlurmJob(nodes=2, gpus_per_node=8, time="04:00:00", job_name="big")
COMMAND = ["model=gpt", "data path=a b", "resume=auto"]


def settings(job: SlurmJob) -> dict[str, str]:
    """The `#SBATCH` settings by name."""
    text = job.text(COMMAND, "/opt/python", "a plan", "parallelrun slurm")
    lines = [line.split("#", 2)[1].removeprefix("SBATCH --").strip() for line in text.splitlines() if "SBATCH" in line]
    return dict((line.split("=", 1) + [""])[:2] for line in lines)  # type: ignore[misc]


def test_a_rank_for_each_gpu_a_signal_before_the_end_and_another_start():
    found = settings(GPUS)
    assert found["nodes"] == "2" and found["ntasks-per-node"] == found["gpus-per-node"] == "8"
    assert found["signal"] == "B:USR1@300" and "requeue" in found and found["time"] == "04:00:00"
    assert found["cpus-per-task"] == "8", "Slurm gives a task one core by itself"
    assert "srun --kill-on-bad-exit=1 --cpus-per-task=8 " in GPUS.text(COMMAND, "p", "t", "w")
    assert not {"partition", "account", "qos", "constraint"} & set(found)
    assert settings(replace(GPUS, save_s=0))["signal"] == "B:USR1@0"


def test_what_is_given_is_asked_for():
    job = replace(GPUS, partition="gpu", account="team", qos="high", constraint="a100", cpus_per_task=4, save_s=60)
    found = settings(job)
    assert [found[name] for name in ("partition", "account", "qos", "constraint")] == ["gpu", "team", "high", "a100"]
    assert found["cpus-per-task"] == "4" and found["signal"] == "B:USR1@60"
    assert "srun --kill-on-bad-exit=1 --cpus-per-task=4" in job.text(COMMAND, "p", "t", "w"), "srun does not inherit it"


def test_a_job_on_cpus_asks_for_no_gpu():
    job = SlurmJob(nodes=4, tasks_per_node=2, time="10:00")
    found = settings(job)
    assert (job.num_ranks, found["ntasks-per-node"]) == (8, "2") and "gpus-per-node" not in found
    assert found["cpus-per-task"] == "1"


@pytest.mark.parametrize(
    ("time", "limit_s"),
    [
        ("5", 300),
        ("10:30", 630),
        ("1:00:05", 3605),
        ("2-0", 172_800),
        ("1-1:30", 91_800),
        ("1-02:03:04", 93_784),
        ("UNLIMITED", float("inf")),
    ],
)
def test_a_job_that_would_be_told_to_save_as_soon_as_it_begins_is_refused(time, limit_s):
    """It would be queued again for ever."""
    job = replace(GPUS, time=time)
    assert job.limit_s == limit_s
    assert [one.where for one in job.problems()] == (["save_s"] if time == "5" else [])
    assert not replace(job, save_s=75).problems()


def test_words_reach_the_ranks_as_they_were_given(tmp_path):
    """bash reads the file without complaint, and srun gets every word whole."""
    script = GPUS.text(COMMAND, "/opt/my python", "a plan", "w")
    assert subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True).returncode == 0
    (line,) = [line for line in script.splitlines() if "parallelrun model=gpt" in line]
    assert shlex.split(line.strip().removesuffix("&")) == ["/opt/my python", "-m", "parallelrun", *COMMAND]


SAVES = "trap 'sleep 0.3; exit 75' USR1; sleep 0.3; kill -USR1 $PPID; for i in $(seq 400); do sleep 0.05; done"


@pytest.mark.parametrize(
    ("srun", "code", "requeued"), [("exit 0", 0, ""), ("exit 6", 6, ""), ("exit 75", 75, "requeue 17\n"),
                                   (SAVES, 75, "requeue 17\n")],
)  # fmt: skip
def test_only_a_saved_run_is_queued_again(tmp_path, srun, code, requeued):
    """With an srun and a scontrol of the test's. SAVES: an srun that saves and ends some time after the signal, which
    must not end the shell earlier."""
    for name, body in (("srun", srun), ("scontrol", 'echo "$@" > requeued')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "17"}
    script = tmp_path / "job.sh"
    script.write_text(GPUS.text(COMMAND, "python", "a plan", "w"))
    done = subprocess.run(["bash", str(script)], env=environ, cwd=tmp_path, capture_output=True, timeout=60)
    assert done.returncode == code, done.stderr
    assert ((tmp_path / "requeued").read_text() if requeued else "") == requeued
    assert (tmp_path / "requeued").exists() == bool(requeued)


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"nodes": 0}, {"nodes"}),
        ({"gpus_per_node": 0}, {"gpus_per_node"}),
        ({"tasks_per_node": 9}, {"tasks_per_node"}),
        ({"time": ""}, {"time"}),
        ({"time": "4h"}, {"time"}),
        ({"partition": "a b", "time": "x", "nodes": -1}, {"partition", "time", "nodes"}),
    ],
)
def test_every_mistake_is_told_with_what_to_type(changes, where):
    problems = replace(GPUS, **changes).problems()
    assert {problem.where for problem in problems} == where
    assert all(problem.suggestion for problem in problems)


@pytest.mark.parametrize(("time", "save_s"), [("5", 300), ("10", 900), ("00:00:40", 300)])
def test_the_seconds_that_are_offered_for_saving_are_taken(time, save_s):
    (problem,) = replace(GPUS, time=time, save_s=save_s).problems()
    assert replace(GPUS, time=time, save_s=int(problem.suggestion.removeprefix("save_s="))).problems() == []


def test_a_container_s_name_reaches_pyxis_as_it_was_given():
    image = "registry#team/my image;x:1"
    lines = replace(GPUS, container=image).text(COMMAND, "p", "t", "w").splitlines()
    (line,) = [line for line in lines if "--container-image" in line]
    words = shlex.split(line.removesuffix("\\"))
    assert words == [f"--container-image={image}", "--container-mounts=$PWD:$PWD", "--container-workdir=$PWD"]
