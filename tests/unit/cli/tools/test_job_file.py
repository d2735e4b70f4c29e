"""`parallelrun slurm`: settings of the job apart from the run's keys, the plan checked before anything waits."""

from __future__ import annotations

import pytest

from parallelrun.base.errors import ConfigError
from parallelrun.cli.main import main
from parallelrun.cli.tools.job_file import slurm

JOB = ("nodes=2", "gpus_per_node=2", "time=10:00")
RUN = ("model=gpt", "strategy=ptdp", "tp=2", "dp=2")


def test_the_file_runs_the_command_on_gpus_and_resumes(capsys):
    assert main(["slurm", *RUN, *JOB, "partition=gpu", "python=/opt/python"]) == 0
    text = capsys.readouterr().out
    assert "/opt/python -m parallelrun model=gpt strategy=ptdp tp=2 dp=2 resume=auto device=cuda &" in text
    assert "#SBATCH --partition=gpu" in text and "# gpt, ptdp: dp=2 tp=2, bf16, 4 ranks on 2 nodes" in text
    assert "#SBATCH --job-name=gpt-ptdp-dp2tp2" in text


def test_what_the_run_says_itself_is_not_said_twice(capsys):
    assert main(["slurm", "verify", *RUN, "device=cpu", *JOB]) == 0
    assert "-m parallelrun verify model=gpt strategy=ptdp tp=2 dp=2 device=cpu &" in capsys.readouterr().out


def test_all_mistakes_come_at_once_with_what_to_type():
    with pytest.raises(ConfigError) as caught:
        slurm(["model=gpt", "tp=3", "nodes=two", "gpus_per_node=8", "time=soon", "partitoin=a"])
    where = {problem.where for problem in caught.value.problems}
    assert where == {"nodes", "time", "partitoin", "world"}
    assert all(problem.suggestion for problem in caught.value.problems)


NODES = {
    "slurm": ("nodes=2", "gpus_per_node=2", "time=10:00"),
    "k8s": ("nodes=2", "gpus_per_node=2", "image=i", "claim=c"),
    "sky": ("nodes=2", "gpus_per_node=2", "accelerator=H100", "bucket=my-runs"),
}
DEFAULTS = ("steps=60, the default", "dataset=pystdlib, the default")


@pytest.mark.parametrize("verb", NODES)
@pytest.mark.parametrize(
    ("words", "warned"),
    [
        ((), (True, True)),
        (("steps=60",), (False, True)),
        (("device=cpu", "dataset=pystdlib"), (True, False)),
        (("recipe=./recipe.yaml",), (False, False)),
    ],
)
def test_a_job_warns_of_defaults_that_a_queue_is_too_long_for(verb, words, warned, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    head = (
        "# @package _global_\ndefaults:\n  - override /precision: bf16\n  - override /dataset: synthetic\nsteps: 60\n"
    )
    (tmp_path / "recipe.yaml").write_text(head)
    assert main([verb, "model=gpt", "strategy=ddp", "dp=4", *words, *NODES[verb]]) == 0
    out, err = capsys.readouterr()
    for text, is_warned in zip(DEFAULTS, warned, strict=True):
        assert (f"warning: {text}" in err) == is_warned == (f"# warning: {text}" in out), text


def test_a_verification_has_no_default_to_warn_of(capsys):
    assert main(["slurm", "verify", *RUN, *JOB]) == 0
    assert "warning" not in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (("tp=8", "pp=8", "dp=1", "gpus_per_node=8", "nodes=4"), "nodes=8"),
        (("dp=64", "global_batch=64", "cluster=h100_dgx", "nodes=4"), "nodes=8"),
        (("dp=64", "global_batch=64", "tasks_per_node=4", "nodes=4"), "nodes=16"),
        (("dp=4", "gpus_per_node=2", "nodes=7"), "nodes=2"),
    ],
)
def test_a_plan_of_more_or_fewer_nodes_names_their_number(words, fix, capsys):
    run = ["slurm", "model=gpt", "time=10:00", *words]
    with pytest.raises(ConfigError, match=r"the plan has \d+ ranks, and \d nodes of \d have") as caught:
        slurm(run[1:])
    assert [problem.suggestion for problem in caught.value.problems] == [fix]
    assert main([word for word in run if not word.startswith("nodes=")] + [fix]) == 0


def test_the_gpus_of_a_node_are_those_of_the_named_cluster(capsys):
    assert main(["slurm", "model=gpt", "strategy=ddp", "cluster=h100_dgx", "nodes=2", "time=10:00"]) == 0
    text = capsys.readouterr().out
    assert "--gpus-per-node=8\n" in text and "16 ranks on 2 nodes" in text and "device=cuda" in text
    for cluster in ((), ("cluster=h100_dgx", "cluster.cores=64"), ("cluster=h100_dgx", "device=cpu")):
        with pytest.raises(ConfigError, match="the number of ranks on a node is not known"):
            slurm(["model=gpt", "strategy=ddp", *cluster, "nodes=2", "time=10:00"])


@pytest.mark.parametrize("words", [["plan"], ["-m", "seed=1,2"], ["explain"]])
def test_only_a_run_becomes_a_job(words):
    with pytest.raises(ConfigError, match="slurm writes the file of one run"):
        slurm([*words, *RUN, *JOB])


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


def test_more_ranks_than_any_machine_has_are_refused_at_once():
    with pytest.raises(ConfigError, match="have 799999999999999999992 ranks, more than"):
        slurm(["model=gpt", "strategy=ptdp", "nodes=99999999999999999999", "gpus_per_node=8", "time=1:00:00"])
