"""No false alarm: under every way, all ranks issue the same in the two steps that are watched."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallelrun.base.errors import CollectiveMismatch
from parallelrun.distributed import comm, sequences
from parallelrun.distributed.mesh import build_mesh
from parallelrun.planner.resolve.resolve_config import resolve
from parallelrun.training.loop.build import build
from parallelrun.training.loop.schedules import LossScaler
from parallelrun.training.loop.step import train_step
from parallelrun.training.metrics.first_steps import FirstSteps
from tests.matrix import shared
from tests.plans import tiny_config, tiny_plan
from tests.pool import run_ranks

UNEVEN = {"model.vocab": 37, "dataset.vocab": 37}
PLANS: list[dict[str, Any]] = [
    {"dp": 2, "tp": 2, "strategy.tensor.sequence_parallel": True, **UNEVEN},
    {"dp": 2, "pp": 2, "strategy.data.kind": "zero1", **UNEVEN},
    {"dp": 2, "pp": 2, "strategy.data.kind": "fsdp", "strategy.pipeline.kind": "gpipe"},
    {"tp": 2, "pp": 2, "strategy.pipeline.kind": "interleaved", "micro_batch": 2, "model.layers": 4},
    {"tp": 2, "pp": 2, "strategy.pipeline.kind": "zbv", "micro_batch": 2, "model.layers": 6},
]


def two_steps(overrides: dict[str, Any], directory: str) -> list[str]:
    config = tiny_config(overrides)
    training = build(config, resolve(config), torch.device("cpu"))
    first_steps = FirstSteps(training.mesh, config, 0, Path(directory))
    scaler = LossScaler(config.precision, False)
    lanes = []
    for step in (1, 2, 3):
        with first_steps.watch(step):
            train_step(training, step, 0.01, scaler)
            found = sequences.read_all(Path(directory)).get(training.mesh.rank)
            lanes = [str(lane) for lane in found.issued] if step == 2 and found else lanes
        assert (first_steps.counted is None) == (step == 1)
    return lanes


@pytest.mark.parametrize("overrides", shared(PLANS), ids=lambda plan: "-".join(f"{v}" for v in plan.values()))
def test_every_way_issues_the_same_on_all_ranks(overrides: dict[str, Any], tmp_path: Path) -> None:
    lanes = run_ranks(4, two_steps, overrides, str(tmp_path))
    assert all("world (ranks 0, 1, 2, 3)" in of_rank for of_rank in lanes)
    if overrides.get("pp") == 2:
        assert any("messages from rank" in lane for lane in lanes[0])
    assert not sequences.read_all(tmp_path), "the files go when the first steps were alike"


def planted(how: str, directory: str) -> str:
    """Rank 1 of tp=3 differs in a way that gloo takes without a word; what each rank is told."""
    config, mesh = (
        tiny_config(steps=1),
        build_mesh(tiny_plan({"tp": 3, "model.heads": 3, "model.hidden": 18, "model.vocab": 33}), torch.device("cpu")),
    )
    first_steps, group, odd = FirstSteps(mesh, config, 0, Path(directory)), mesh.group("tp"), mesh.rank == 1
    try:
        with first_steps.watch(1):
            comm.all_reduce(torch.ones(4), group, "activations")
            if how == "dtype":
                comm.all_reduce(torch.ones(4, dtype=torch.int32 if odd else torch.float32), group, "activations")
            elif how == "shape":
                comm.all_reduce(torch.ones((2, 2) if odd else 4), group, "activations")
            elif how == "reduction":
                comm.all_reduce(torch.ones(4), group, "activations", op="max" if odd else "sum")
            elif how == "order":
                for purpose in ("loss", "gradients") if odd else ("gradients", "loss"):
                    comm.all_reduce(torch.ones(4), group, purpose)
    except CollectiveMismatch as error:
        return str(error)
    finally:
        dist.barrier()  # rank 0 serves the store
    return "accepted"


@pytest.mark.parametrize(
    ("how", "others", "odd"),
    [
        ("dtype", "float32 4 (16 bytes), activations", "int32 4 (16 bytes), activations"),
        ("shape", "float32 4 (16 bytes), activations", "float32 2x2 (16 bytes), activations"),
        ("reduction", "(sum) of float32 4 (16 bytes), activations", "(max) of float32 4 (16 bytes), activations"),
        ("order", "float32 4 (16 bytes), gradients", "float32 4 (16 bytes), loss"),
    ],
)  # fmt: skip
def test_what_gloo_takes_for_the_same_is_told_apart(how: str, others: str, odd: str, tmp_path: Path) -> None:
    told = run_ranks(3, planted, how, str(tmp_path))
    for rank in (1, 2):  # the odd one and the member after it see a difference to the one before them
        assert "step 1: ranks issue different collectives over tp (ranks 0, 1, 2); collective 2 is:" in told[rank]
        both = rf"is: ranks 0, 2: all_reduce.*{re.escape(others)}; rank 1: all_reduce.*{re.escape(odd)}"
        assert re.search(both, told[rank]), told[rank]
    assert told[0] == "accepted" and os.listdir(tmp_path / "logs")


def scalar_for_a_vector(directory: str) -> None:
    """What torch 2.11's pipelines say first: a scalar, to who receives a vector of one element."""
    config, mesh = tiny_config(steps=1), build_mesh(tiny_plan(pp=2), torch.device("cpu"))
    group = mesh.group("pp").process_group
    with FirstSteps(mesh, config, 0, Path(directory)).watch(1):
        if mesh.rank == 0:
            dist.send(torch.tensor(1.0), group=group, group_dst=1)
        else:
            dist.recv(torch.zeros(1), group=group, group_src=0)
    dist.barrier()  # rank 0 serves the store


def test_a_scalar_and_a_vector_of_one_element_are_the_same_message(tmp_path: Path) -> None:
    run_ranks(2, scalar_for_a_vector, str(tmp_path))
