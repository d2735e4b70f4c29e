"""Checks before a run: cores, memory, the launcher's world, and GPUs (faked): which one a rank uses, too few GPUs."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

from parallelrun.base.errors import ConfigError, EnvironmentProblem
from parallelrun.launch.host import preflight
from parallelrun.launch.host.environment import Attached
from parallelrun.launch.host.job import RankSettings
from parallelrun.launch.ranks import rank
from tests.plans import tiny_config, tiny_plan


def see(monkeypatch, count: int, first: int = 0, num_bytes: int = 2**36) -> list[torch.device]:
    """Let this process see `count` GPUs, the host's from `first` on. Return the list of devices that it then sets."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda index: SimpleNamespace(uuid=f"GPU-{first + range(count)[index]}", total_memory=num_bytes),
    )
    return chosen


@pytest.mark.parametrize(
    ("launcher", "local_rank", "visible", "first", "identity"),
    [
        ("torchrun: every process sees all GPUs of the host", 3, 4, 0, "GPU-3"),
        ("srun --gpus-per-task=1: each sees its own", 3, 1, 3, "GPU-3"),
        ("srun --gpus-per-task=2", 3, 2, 6, "GPU-7"),
        ("one rank, one GPU", 0, 1, 0, "GPU-0"),
    ],
)
def test_a_rank_uses_one_of_the_gpus_that_its_process_sees(monkeypatch, launcher, local_rank, visible, first, identity):
    chosen = see(monkeypatch, visible, first)
    device = rank._device(tiny_plan(dp=4, device="cuda"), RankSettings(local_rank, local_rank))
    assert chosen == [device] and device.index < visible
    assert preflight.gpu_of_rank(local_rank) == preflight.Gpu(identity, 2**36, visible)


def test_a_process_without_a_gpu_says_so(monkeypatch):
    see(monkeypatch, 0)
    assert preflight.gpu_of_rank(1) == preflight.Gpu()


def test_an_attached_run_needs_gpus_and_their_memory_as_a_launched_one(monkeypatch):
    attached = Attached(0, 4, 0, "node7", 29500, "srun", "77.0")
    wanted = {"dp": 4, "device": "cuda"}
    see(monkeypatch, 1)
    assert preflight.check(tiny_config(wanted), tiny_plan(wanted), attached) == []  # the others tell when they join
    see(monkeypatch, 0)
    with pytest.raises(EnvironmentProblem, match="device=cuda, and 0 GPUs are visible"):
        preflight.check(tiny_config(wanted), tiny_plan(wanted), attached)
    with pytest.raises(EnvironmentProblem, match=r"a rank needs .* for weights"):
        preflight.check_memory(tiny_config(wanted), tiny_plan(wanted), 1000, per_rank=True)


@pytest.mark.parametrize(
    ("count", "visible", "words"),
    [
        (0, None, "device=cuda, and 0 GPUs are visible"),
        (0, "", r"0 GPUs are visible \(CUDA_VISIBLE_DEVICES=''\)"),
        (2, "0,1", r"4 ranks on this host, one GPU each, and 2 are visible \(CUDA_VISIBLE_DEVICES='0,1'\)"),
        (2, "1,1", "CUDA_VISIBLE_DEVICES='1,1' names a GPU twice"),
    ],
)
def test_missing_gpus_are_refused_with_numbers(monkeypatch, count, visible, words):
    see(monkeypatch, count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    wanted = {"dp": 4, "device": "cuda"}
    with pytest.raises(EnvironmentProblem, match=words) as caught:
        preflight.check(tiny_config(wanted), tiny_plan(wanted), None)
    assert caught.value.exit_code == 3


def test_ranks_that_share_cores_are_said():
    assert preflight.crowding(2, 2) == []
    assert preflight.crowding(32, 2)[0].startswith("step time is no scaling measurement: 32 ranks on 2 cores")
    assert "expect it to be slow" in preflight.crowding(17, 2)[0]
    assert "expect" not in preflight.crowding(16, 2)[0]


def test_more_memory_than_there_is_is_refused_with_numbers(monkeypatch):
    monkeypatch.setattr(preflight, "available_bytes", lambda: 2**30)
    big = {"model.hidden": 4096, "model.layers": 4, "model.vocab": 32, "dp": 2}
    with pytest.raises(preflight.EnvironmentProblem, match=r"2 ranks .* need [\d.]+ GiB .* 1\.0 GiB are available"):
        preflight.check(tiny_config(big), tiny_plan(big), None)
    preflight.check(tiny_config(dp=2), tiny_plan(dp=2), None)


@pytest.mark.parametrize("version", ["2.11.0", "2.11.0+cu130", "2.9.1"])
def test_an_old_compiler_takes_no_packed_samples(version, monkeypatch):
    monkeypatch.setattr(preflight, "version", lambda name: version)
    packed = {"compile": True, "dataset.pack": True}
    with pytest.raises(ConfigError, match=rf"needs torch 2\.12, and torch {re.escape(version)} is installed") as found:
        preflight.check(tiny_config(packed), tiny_plan(packed), None)
    assert found.value.problems[0].suggestion == "compile=false or dataset.pack=false"
    for one in ({"compile": True}, {"dataset.pack": True}):
        preflight.check(tiny_config(one), tiny_plan(one), None)


@pytest.mark.parametrize("version", ["2.12.0", "2.13.0+cpu", "3.0", "unknown"])
def test_a_newer_compiler_takes_them(version):
    preflight.refuse_packed_compile(version)


@pytest.mark.parametrize("limits", [(54, 54), (32, 54), (32, -1)])
def test_as_many_open_files_are_allowed_as_the_ranks_need(monkeypatch, limits):
    now = [limits]
    monkeypatch.setattr(preflight.resource, "getrlimit", lambda _: now[0])
    monkeypatch.setattr(preflight.resource, "setrlimit", lambda _, asked: now.__setitem__(0, asked))
    preflight.allow_open_files(8)
    assert now == [(54, limits[1])]


def test_too_few_open_files_are_told_with_the_number_that_is_needed(monkeypatch):
    monkeypatch.setattr(preflight.resource, "getrlimit", lambda _: (32, 53))
    with pytest.raises(EnvironmentProblem, match="each of 8 ranks opens 54 files, and the limit of this shell is 53"):
        preflight.allow_open_files(8)
    monkeypatch.setattr(preflight.resource, "getrlimit", lambda _: (3, 3))
    with pytest.raises(EnvironmentProblem, match="each of 2 ranks opens 24 files"):
        preflight.check(tiny_config(dp=2), tiny_plan(dp=2), None)


def test_verify_is_refused_where_a_run_of_the_plan_fits() -> None:
    """VGG-16 on 16 GB: a run fits, and verify needs 14 GiB more for what it compares; a killed process says nothing."""
    words = {"model.name": "vgg", "model.preset": "vgg16", "dp": 2, "global_batch": 2, "dataset.name": "synthetic"}
    words |= {"model.vocab": 1000, "model.image": 224, "model.stages": [2, 2, 3, 3, 3], "model.ffn": 4096}
    plan = tiny_plan(words)
    assert 138e6 < plan.spec.num_parameters < 139e6
    assert preflight.check_memory(tiny_config(words), plan, 16 * 10**9, per_rank=False) == []
    verified = tiny_config({**words, "verb": "verify"})
    with pytest.raises(EnvironmentProblem, match=r"2 ranks on this host need .* 14.4 GiB of it to compare") as caught:
        preflight.check_memory(verified, plan, 16 * 10**9, per_rank=False)
    assert "verify.steps=1" in caught.value.problems[0].suggestion
    assert preflight.check_memory(verified, plan, 10**12, per_rank=False) == []


def test_verify_on_gpus_compares_in_the_memory_of_the_host(monkeypatch) -> None:
    """Between the bytes of the reference's weights and those of all tensors that are compared."""
    words = {"model.hidden": 64, "device": "cuda", "dp": 2, "global_batch": 2}
    config, plan = tiny_config({**words, "verb": "verify"}), tiny_plan(words)
    monkeypatch.setattr(preflight, "available_bytes", lambda: 8 * 3 * plan.spec.num_parameters)
    with pytest.raises(EnvironmentProblem, match="on the host of rank 0 for the tensors that it compares"):
        preflight.check_memory(config, plan, 10**12, per_rank=True)
    assert preflight.check_memory(tiny_config(words), plan, 10**12, per_rank=True) == []
    monkeypatch.setattr(preflight, "available_bytes", lambda: 8 * 20 * plan.spec.num_parameters)
    assert preflight.check_memory(config, plan, 10**12, per_rank=True) == []
