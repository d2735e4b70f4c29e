"""`doctor`'s all-reduce: ranks that are started and watched as those of a run sum a tensor over gloo or NCCL."""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path

from parallelrun.config.schema import Config
from parallelrun.context import WorkerContext
from parallelrun.errors import EXIT_OK
from parallelrun.launch import directory, supervisor
from parallelrun.launch.rank import Job
from parallelrun.plan.freeze import freeze
from parallelrun.plan.resolve import resolve
from parallelrun.plan.structure import Plan
from parallelrun.records import write_text

NCCL, GLOO = "nccl", "gloo"
NUM_ELEMENTS = 2**24  # on GPUs 64 MiB of fp32: large enough for the time to show the bandwidth
TIMEOUT_S = 90.0


class AllReduceFailed(Exception):
    """The sum failed; the message names the rank and its error."""


def run(num_ranks: int, backend: str) -> float:
    """Sum a tensor over `num_ranks` processes, with gloo on the CPU; the seconds of one sum. Raises AllReduceFailed."""
    device = "cuda" if backend == NCCL else "cpu"
    config = replace(Config(), dp=num_ranks, global_batch=num_ranks, device=device, timeout_s=TIMEOUT_S)
    plan = resolve(config)
    with tempfile.TemporaryDirectory(prefix="parallelrun-doctor-") as root:
        folder = directory.create(Path(root), "doctor")
        write_text(folder / "config.yaml", freeze(config, plan))
        outcome = supervisor.supervise(Job(config, plan, folder, f"{__name__}:sum_twice"))
        if outcome.cause is not None:
            raise AllReduceFailed(f"rank {outcome.cause.rank} of {num_ranks}: {outcome.cause.what}")
        if outcome.exit_code != EXIT_OK:
            raise KeyboardInterrupt
        return max(float(file.read_text()) for file in folder.glob("seconds_*"))


def sum_twice(config: Config, plan: Plan, context: WorkerContext) -> int:
    """The worker of a rank: sum twice (the first sum opens the connections), check every element, note the seconds."""
    import torch
    import torch.distributed as dist

    num_ranks, on_gpu = context.world, context.device.type == "cuda"
    if num_ranks == 1:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(NCCL if on_gpu else GLOO, store=store, rank=0, world_size=1)
    for _ in range(2):
        values = torch.full((NUM_ELEMENTS if on_gpu else 1,), context.rank + 1.0, device=context.device)
        began = time.monotonic()
        dist.all_reduce(values)
        smallest, largest = values.min().item(), values.max().item()  # waits for the sum
        seconds = time.monotonic() - began
    expected = num_ranks * (num_ranks + 1) / 2
    if (smallest, largest) != (expected, expected):
        raise ValueError(f"the sum has elements from {smallest:g} to {largest:g} instead of {expected:g}")
    (context.directory / f"seconds_{context.rank}").write_text(str(seconds))
    return EXIT_OK
