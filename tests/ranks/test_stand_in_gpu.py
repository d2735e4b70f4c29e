"""Whole runs with device=cuda on a stand-in for GPUs (`tests.stand_in_gpu`): every tensor is where it is used."""

from __future__ import annotations

import json
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from parallelrun.base.context import WorkerContext
from parallelrun.launch.ranks import worker
from parallelrun.models.optimizers import muon
from tests.matrix import FULL, sparing
from tests.plans import tiny_config, tiny_plan
from tests.stand_in_gpu import OnGpu, stand_in_gpu

LLAMA = {"model.norm": "rmsnorm", "model.activation": "swiglu", "model.position": "rope", "model.bias": False}
EXPERTS = {"model.experts": 4, "model.expert_ffn": 32}
ONE_BLOCK = {"model.layers": 1, "model.expert_period": 1}  # looking for corruption runs it some twenty times
BF16, FP16 = {"precision.name": "bf16"}, {"precision.name": "fp16"}
# What a run does beside its steps: it saves in the background, looks for corruption and evaluates.
BESIDE = {"checkpoint.every": 1, "sdc.every": 1 if FULL else 2, "eval.batches": 1}
RUNS = {
    "one device, fp16": FP16 | BESIDE | {"model.layers": 1, "dropout": 0.1, "recompute": "selective"},
    "fsdp with experts": LLAMA | EXPERTS | ONE_BLOCK | BESIDE | {"dp": 2, "ep": 2, "strategy.data.kind": "fsdp"},
    "rings of gradients and keys": BF16
    | {
        "dp": 2,
        "cp": 2,
        "strategy.data.kind": "ring",
        "model.heads": 2,
        "model.layers": 1,
        "optimizer.offload": True,
        "optimizer.name": "muon",
    },
    "stages": {"pp": 2, "schedule": "1f1b", "dataset.pack": True, "recompute": "offload"},
}
MORE_RUNS = {
    "tp": BF16 | BESIDE | {"tp": 2},
    "2d": FP16 | BESIDE | {"tp": 4, "layout": "2d"},
    "zero1 with compression": {"dp": 2, "strategy.data.kind": "ddp", "strategy.data.compression": "powersgd"},
    "zero2 and stages": {"model.layers": 4, "dp": 2, "pp": 2, "schedule": "zbv", "strategy.data.kind": "zero2"},
    "dropless experts": EXPERTS | BF16 | {"dp": 2, "ep": 2, "strategy.expert.kind": "dropless"},
    "diloco": {"dp": 2, "strategy.data.kind": "diloco", "sdc.every": 1},
}


def train(folder, overrides, device):
    """Run `parallelrun` as this rank; return the losses and gradient norms of its steps."""
    config = tiny_config(overrides, device=device)
    rank = dist.get_rank() if dist.is_initialized() else 0
    folder.mkdir(exist_ok=True)
    right = muon.orthogonalise

    def orthogonalise(matrix):
        assert isinstance(matrix, OnGpu) == (device == "cuda"), "Muon's products are the device's, offloaded or not"
        return right(matrix)

    gpu = stand_in_gpu() if device == "cuda" else nullcontext(torch.device("cpu"))
    with mock.patch.object(muon, "orthogonalise", orthogonalise), gpu as on:
        context = WorkerContext(
            rank=rank, world=tiny_plan(overrides).world, local_rank=rank, device=on, directory=folder,
            heartbeat=lambda step, phase: None, stop_requested=lambda: False, save_failed=lambda step: None,
            console_owner=False,
        )  # fmt: skip
        assert worker.run(config, tiny_plan(overrides, device=device), context) == 0
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()) if rank == 0 else ()
    return [(row["loss"], row["grad_norm"]) for row in rows if "loss" in row]


def both(folder, overrides):
    return [train(folder / device, overrides, device) for device in ("cpu", "cuda")]


SLOW = {"one device, fp16", "rings of gradients and keys", "stages"}


@pytest.mark.parametrize("name", sparing([*RUNS, *(MORE_RUNS if FULL else ())], SLOW))
def test_a_run_on_a_gpu_trains_as_on_the_cpu(tmp_path, run_ranks, name):
    overrides = {"model.layers": 2, "steps": 2, **{**RUNS, **MORE_RUNS}[name]}
    on_cpu, on_gpu = run_ranks(tiny_plan(overrides).world, both, tmp_path, overrides, backend="gloo")[0]
    assert len(on_cpu) == 2 and on_gpu == [pytest.approx(row, rel=1e-6) for row in on_cpu]
    saved = sorted(path.name for path in (tmp_path / "cuda" / "checkpoints").glob("step_*"))
    assert saved == (["step_1", "step_2"] if "checkpoint.every" in overrides else ["step_2"])


def test_the_stand_in_refuses_what_a_gpu_refuses():
    with stand_in_gpu() as gpu:
        there, here = torch.ones(2, 3, device=gpu), torch.ones(2, 3)
        assert isinstance(there + 1, OnGpu) and (there * here.to(gpu)).cpu().tolist() == [[1.0] * 3] * 2
        assert (there + torch.tensor(2.0)).sum().item() == 18.0, "a number of the host is no tensor of another device"
        assert there[torch.tensor([1])].device == gpu
        for mix in (lambda: there + here, lambda: torch.cat([there, here[:0]]), lambda: there.add_(here)):
            with pytest.raises(RuntimeError, match="same device"):
                mix()
        with pytest.raises(TypeError, match="numpy"):
            there.numpy()
