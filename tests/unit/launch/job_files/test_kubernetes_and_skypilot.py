"""The files for Kubernetes and SkyPilot: what they ask for, and that the tools' own schemas take them."""

from __future__ import annotations

import shlex

import pytest
import yaml

from parallelrun.cli.main import main
from parallelrun.launch.job_files.kubernetes import KubernetesJob
from parallelrun.launch.job_files.skypilot import SkyPilotJob
from tests.extras import needs

K8S = ("nodes=2", "gpus_per_node=4", "image=registry/team/train:1", "claim=shared")
SKY = ("nodes=2", "gpus_per_node=8", "accelerator=H100", "bucket=my-runs")


def printed(capsys, *words: str) -> list[dict]:
    """The documents of the file that the program prints."""
    assert main(list(words)) == 0
    return list(yaml.safe_load_all(capsys.readouterr().out))


def test_a_train_job_has_a_rank_for_each_gpu_and_a_volume_for_the_run(capsys):
    secret, job = printed(capsys, "k8s", "model=gpt", "strategy=ddp", *K8S)
    trainer = job["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"], trainer["image"]) == (2, 4, "registry/team/train:1")
    assert trainer["resourcesPerNode"] == {"limits": {"nvidia.com/gpu": 4}}
    assert trainer["command"][:3] == ["python", "-m", "parallelrun"]
    assert {"resume=auto", "runs=/runs", "device=cuda"} < set(trainer["command"])
    reference = trainer["env"][0]["valueFrom"]["secretKeyRef"]
    assert (reference["name"], len(secret["stringData"][reference["key"]])) == (secret["metadata"]["name"], 32)
    pods = job["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]
    pod = pods["template"]["spec"]["template"]["spec"]
    assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "shared"}
    mounts = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounts == {"/runs": pod["volumes"][0]["name"], "/dev/shm": pod["volumes"][1]["name"]}
    assert pod["volumes"][1]["emptyDir"] == {"medium": "Memory"}, "NCCL's, between the GPUs of a pod"


def test_only_pods_of_several_gpus_need_memory_between_them(capsys):
    for words in (("gpus_per_node=1",), ("tasks_per_node=2",)):
        job = printed(capsys, "k8s", "model=gpt", "dp=2", f"nodes={2 if 'gpus' in words[0] else 1}", *words, *K8S[2:])[
            1
        ]
        pods = job["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]
        pod = pods["template"]["spec"]["template"]["spec"]
        assert len(pod["volumes"]) == len(pod["containers"][0]["volumeMounts"]) == 1


def test_a_job_on_cpus_asks_for_no_gpu(capsys):
    job = printed(capsys, "k8s", "model=gpt", "dp=4", "nodes=2", "tasks_per_node=2", "image=i", "claim=c")[1]
    assert job["spec"]["trainer"]["numProcPerNode"] == 2 and "resourcesPerNode" not in job["spec"]["trainer"]
    task = printed(capsys, "sky", "model=gpt", "dp=2", "nodes=2", "bucket=my-runs")[0]
    assert "accelerators" not in task["resources"]


def test_a_task_of_skypilot_runs_one_command_on_every_node(capsys):
    (task,) = printed(capsys, "sky", "model=gpt", "strategy=ddp", *SKY, "spot=1", "infra=gcp/us-central1")
    assert (task["num_nodes"], task["resources"]["accelerators"]) == (2, "H100:8")
    assert (task["resources"]["use_spot"], task["resources"]["infra"]) == (True, "gcp/us-central1")
    assert task["resources"]["job_recovery"] == {"recover_on_exit_codes": [75]}
    assert task["file_mounts"] == {"/runs": {"name": "my-runs", "mode": "MOUNT"}}
    words = shlex.split(task["run"].strip())
    assert words[:3] == ["python", "-m", "parallelrun"] and {"resume=auto", "runs=/runs", "device=cuda"} < set(words)


def test_words_reach_the_ranks_as_they_were_given():
    command = ["model=gpt", "data path=a b", 'quote="x"', "colon: y # no comment"]
    job = yaml.safe_load_all(KubernetesJob(1, 1, job_name="n", image="i", claim="c").text(command, "p", "t", "w"))
    assert list(job)[1]["spec"]["trainer"]["command"][3:] == command
    task = yaml.safe_load(SkyPilotJob(job_name="n", bucket="b").text(command, "p", "t", "w"))
    assert shlex.split(task["run"])[3:] == command


def test_all_mistakes_are_told_at_once(capsys):
    assert main(["k8s", "model=gpt", "tp=3", "nodes=0", "namespace=A_b"]) == 2
    told = capsys.readouterr().err
    for what in ("a job needs a node", "no container image", "number of ranks", "one volume", "namespace=a-b"):
        assert what in told
    assert main(["sky", "model=gpt", "nodes=1", "gpus_per_node=8", "bucket=No", "spot=2"]) == 2
    told = capsys.readouterr().err
    for what in ("accelerator=H100 gpus_per_node=8", "not a bucket's name", "spot=2: 0 or 1"):
        assert what in told


@pytest.mark.parametrize("verb", ["k8s", "sky"])
def test_help_names_every_setting(capsys, verb):
    from dataclasses import fields

    assert main([verb, "--help"]) == 0
    told = capsys.readouterr().out
    job = {"k8s": KubernetesJob, "sky": SkyPilotJob}[verb]
    assert all(f"{one.name}=" in told for one in fields(job))


@needs("kubeflow_trainer_api")
def test_the_models_of_kubeflow_trainer_know_every_field(capsys):
    """What they do not know is dropped on the way through them."""
    from kubeflow_trainer_api.models import IoK8sApiCoreV1Secret, TrainerV1alpha1TrainJob

    secret, job = printed(capsys, "k8s", "model=gpt", "strategy=ddp", *K8S)
    assert without_none(TrainerV1alpha1TrainJob.from_dict(job).to_dict()) == job
    assert without_none(IoK8sApiCoreV1Secret.from_dict(secret).to_dict()) == secret
    job["spec"]["trainer"]["numNode"] = 2
    assert without_none(TrainerV1alpha1TrainJob.from_dict(job).to_dict()) != job


def without_none(value):
    if isinstance(value, dict):
        return {key: without_none(one) for key, one in value.items() if one is not None}
    return [without_none(one) for one in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", ["x" * 60, "Gpt_3.175B-ptdp-dp6tp8pp64", "--", "a" * 49 + "-b"])
def test_a_run_s_name_becomes_one_that_the_tools_take(name):
    for job in (KubernetesJob(1, 1, image="i", claim="c"), SkyPilotJob(bucket="my-runs")):
        assert job.named(name).problems() == []


def test_a_node_without_gpus_has_one_rank_on_skypilot():
    assert (SkyPilotJob(nodes=3).num_ranks, SkyPilotJob(nodes=3, gpus_per_node=4).num_ranks) == (3, 12)
