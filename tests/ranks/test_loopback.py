"""An outside witness of the byte counts: what the kernel says went over loopback in one step."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallelrun.distributed import torch_private
from parallelrun.distributed.comm.counter import ENGINE
from parallelrun.planner.predict import prediction
from parallelrun.planner.resolve.resolve_config import resolve
from parallelrun.training.loop.build import build
from parallelrun.training.loop.schedules import LossScaler
from parallelrun.training.loop.step import train_step
from tests.matrix import FULL
from tests.plans import tiny_config
from tests.pool import run_ranks

# gloo sends a reduce-scatter as a whole all-reduce, twice the bandwidth-optimal bytes; our own (`comm`) does not
GLOO_FACTOR = {("reduce_scatter", ENGINE): 2.0}
LARGE = {
    "model.layers": 1,
    "model.hidden": 256,
    "model.seq": 128,
    "model.vocab": 2048,
    "dataset.vocab": 2048,
    "global_batch": 8,  # activations of 1 MiB a rank
    "microbatches": 1,
}
REPEATS = 2 if FULL else 1


def sent_bytes() -> int:
    """Bytes that the loopback interface of this network namespace has transmitted."""
    line = next(line for line in Path("/proc/self/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])


def witness(overrides: dict[str, Any]) -> tuple[float, float]:
    """(bytes by the kernel in the quietest of some steps, bytes by the plan with gloo's factors), over all ranks."""
    config = tiny_config({**LARGE, **overrides})
    plan = resolve(config)
    training = build(config, plan, torch.device("cpu"))
    seen = []
    for step in range(1, REPEATS + 2):
        dist.barrier()
        before = sent_bytes()
        dist.barrier()
        train_step(training, step, 0.0, LossScaler(config.precision, scaled=False))
        dist.barrier()
        seen.append(sent_bytes() - before)
        dist.barrier()
    said = 0.0
    for rank in range(plan.world):
        for row in prediction.collectives(plan, rank):
            size = prediction.group_size(plan, row.axis)
            said += prediction.wire_bytes(row, size) * GLOO_FACTOR.get((row.operation, row.purpose), 1.0)
    return float(min(seen[1:])), said


CASES: dict[str, dict[str, Any]] = {
    "ddp": {"dp": 2},
    "zero1": {"dp": 2, "strategy.data.kind": "zero1"},
    "ring": {"dp": 2, "strategy.data.kind": "ring"},
    "fsdp": {"dp": 2, "strategy.data.kind": "fsdp"},
    "tp": {"tp": 2},
    "tp, sequence parallel": {"tp": 2, "strategy.tensor.sequence_parallel": True},
    "experts": {"dp": 2, "ep": 2, "model.experts": 4, "model.expert_period": 1, "model.router.capacity_factor": 1.0},
    "gpipe": {"pp": 2, "model.layers": 2, "strategy.pipeline.kind": "gpipe", "microbatches": 2},
}


def quiet_network() -> None:
    """Move the ranks into a network namespace of their own, with loopback up: nobody else's bytes are counted.

    Where the kernel does not allow it (no root) the host's loopback is used: exact only on a quiet machine.
    """
    new_network_namespace = 0x40000000
    libc, store = ctypes.CDLL(None, use_errno=True), torch_private.default_store()
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        if libc.unshare(new_network_namespace) == 0:
            set_flags, up_and_running = 0x8914, 0x1 | 0x40
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
                fcntl.ioctl(any_socket, set_flags, struct.pack("16sh", b"lo", up_and_running) + b"\0" * 16)
        store.set("of rank 0", str(os.getpid()))
    else:
        with open(f"/proc/{int(store.get('of rank 0'))}/ns/net") as namespace:
            libc.setns(namespace.fileno(), new_network_namespace)
    dist.init_process_group("gloo", store=dist.PrefixStore("quiet", store), rank=rank, world_size=world)


def witnesses() -> dict[str, tuple[float, float]]:
    """Body of a rank: (seen, said) of every case."""
    quiet_network()
    return {name: witness(case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def figures() -> dict[str, tuple[float, float]]:
    """(seen, said) of every case."""
    return run_ranks(2, witnesses, fresh=True, backend="gloo")[0]


@pytest.mark.parametrize("case", CASES)
def test_the_kernel_saw_what_the_plan_foretold(figures: dict[str, tuple[float, float]], case: str) -> None:
    seen, said = figures[case]
    assert seen == pytest.approx(said, rel=0.01)
