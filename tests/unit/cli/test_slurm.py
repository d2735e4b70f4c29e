"""`parallelrun slurm`: settings of the job apart from the run's keys, the plan checked before anything waits."""

from __future__ import annotations

import pytest

from parallelrun.cli import slurm
from parallelrun.cli.main import main
from parallelrun.errors import ConfigError

JOB = ("nodes=2", "gpus_per_node=2", "time=10:00")
RUN = ("model=gpt", "strategy=ptdp", "tp=2", "dp=2")


def test_the_file_runs_the_command_on_gpus_and_resumes(capsys):
    assert main(["slurm", *RUN, *JOB, "partition=gpu", "python=/opt/python"]) == 0
    text = capsys.readouterr().out
    assert "/opt/python -m parallelrun model=gpt strategy=ptdp tp=2 dp=2 resume=auto device=cuda &" in text
    assert "#SBATCH --partition=gpu" in text and "# gpt, ptdp: dp=2 tp=2, 4 ranks on 2 nodes" in text
    assert "#SBATCH --job-name=gpt-ptdp-dp2tp2" in text


def test_what_the_run_says_itself_is_not_said_twice(capsys):
    assert main(["slurm", "verify", *RUN, "device=cpu", *JOB]) == 0
    assert "-m parallelrun verify model=gpt strategy=ptdp tp=2 dp=2 device=cpu &" in capsys.readouterr().out


def test_all_mistakes_come_at_once_with_what_to_type():
    with pytest.raises(ConfigError) as caught:
        slurm.main(["model=gpt", "tp=3", "nodes=two", "gpus_per_node=8", "time=soon", "partitoin=a"])
    where = {problem.where for problem in caught.value.problems}
    assert where == {"nodes", "time", "partitoin", "world"}
    assert all(problem.suggestion for problem in caught.value.problems)


@pytest.mark.parametrize("words", [["plan"], ["-m", "seed=1,2"], ["explain"]])
def test_only_a_run_becomes_a_job(words):
    with pytest.raises(ConfigError, match="slurm writes the file of one run"):
        slurm.main([*words, *RUN, *JOB])


def test_a_job_is_submitted_only_when_told_and_without_slurm_that_is_an_error(monkeypatch, tmp_path, capsys):
    sbatch = tmp_path / "sbatch"
    sbatch.write_text("#!/bin/sh\ncat > submitted\necho Submitted batch job 5\n")
    sbatch.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert main(["slurm", *RUN, *JOB]) == 0 and not (tmp_path / "submitted").exists()
    assert main(["slurm", *RUN, *JOB, "--submit"]) == 0
    assert capsys.readouterr().out.endswith("Submitted batch job 5\n")
    assert (tmp_path / "submitted").read_text().startswith("#!/bin/bash")
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert main(["slurm", *RUN, *JOB, "--submit"]) == 3
    assert "sbatch is not installed here" in capsys.readouterr().err


def test_a_job_that_slurm_refuses_is_an_error_with_its_words(monkeypatch, tmp_path, capsys):
    sbatch = tmp_path / "sbatch"
    sbatch.write_text("#!/bin/sh\necho 'invalid partition specified: gpu' >&2; exit 1\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert main(["slurm", *RUN, *JOB, "--submit"]) == 3
    assert "sbatch: invalid partition specified: gpu" in capsys.readouterr().err
