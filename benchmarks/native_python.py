"""What a rank's Python does in one training step: its share of the time, calls, collectives, and reads of tensors.

    python -m benchmarks.native_python                         # every case at hidden 128, with two ranks (2D: four)
    python -m benchmarks.native_python --case single --steps 50

Rank 0's main thread is profiled by cProfile, which makes Python slower and leaves operators as they are: the shares of
Python are upper bounds. They are shares of the step without waiting for other ranks. `ours` is Python of this project
outside torch's operators, `torch` is torch's Python, `reading` is the dataset. `calls` are the calls of this project's
Python functions in a step. `reads` are tensors whose values Python reads (`item`, `tolist`, `bool`): on CUDA each of
them waits for the device.
"""

from __future__ import annotations

import cProfile
import os
import pstats
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

import parallelrun
import parallelrun.strategies
from benchmarks.native import CASES, CLIP, LR
from benchmarks.pairs import on_ranks, read_arguments, write
from benchmarks.plain_gpt import SIZES
from parallelrun.distributed.comm.counter import CommunicationCounter
from parallelrun.planner.resolve.resolve_config import resolve
from parallelrun.training.loop.build import build
from parallelrun.training.loop.schedules import LossScaler
from parallelrun.training.loop.step import train_step
from tests.plans import tiny_config

OURS = (str(Path(parallelrun.__file__).parent), str(Path(parallelrun.strategies.__file__).parent))
TORCH = str(Path(torch.__file__).parent)
KERNELS = f"{OURS[0]}/torch_private/products.py"  # called by torch, in place of its own kernels
READING = (f"{OURS[0]}/data/", f"{OURS[0]}/train/reader.py", f"{OURS[0]}/definitions.py")
GSHARD = {"kind": "gshard", "top_k": 2, "capacity_factor": 1.25, "second_expert": "random", "aux_coefficient": 0.01}
EXPERTS = {
    **{"dp": 2, "ep": 2, "strategy.expert.kind": "capacity", "model.experts": 4},
    **{f"model.router.{key}": value for key, value in GSHARD.items()},
}
OVERRIDES: dict[str, dict[str, Any]] = {
    **{case: CASES[case]["overrides"] for case in ("single", "ddp", "fsdp", "tp")},
    "gpipe": {"pp": 2, "strategy.pipeline.kind": "gpipe"},
    "1f1b": CASES["pp"]["overrides"],
    "2d": {"tp": 4, "layout": "2d", "strategy.tensor.kind": "grid"},
    "experts": EXPERTS,
}
READS = ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "numpy")


class HostReads(TorchFunctionMode):
    """Counts the tensors whose values Python reads."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name in READS:
            self.found[name] += 1
        return function(*args, **(kwargs or {}))


def count_calls(step: Callable[[], object], files: tuple[str, ...] = OURS) -> Counter[str]:
    """Count, by file and function, the Python functions of `files` that a step calls, and the C functions they call.

    Kernels of products are left out: they belong to the operators."""
    found: Counter[str] = Counter()

    def observe(frame: FrameType, event: str, argument: Any) -> None:
        file = frame.f_code.co_filename
        if event in ("call", "c_call") and file.startswith(files) and file != KERNELS:
            called = "" if event == "call" else f" calls {getattr(argument, '__name__', argument)}"
            found[f"{frame.f_code.co_filename}:{frame.f_code.co_qualname}{called}"] += 1

    sys.setprofile(observe)
    try:
        step()
    finally:
        sys.setprofile(None)
    return found


def shares(step: Callable[[], object], steps: int) -> dict[str, float]:
    """Profile `steps` steps: seconds of a step by kind."""
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(steps):
        step()
    profile.disable()
    seconds: Counter[str] = Counter()
    stats: dict[Any, Any] = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    for (file, _, function), (_, _, own, _, _) in stats.items():
        seconds[_kind(file, function)] += own / steps
    return dict(seconds)


def _kind(file: str, function: str) -> str:
    if file.startswith(READING) or "numpy" in file or "numpy" in function:
        return "reading"
    if file.startswith(f"{OURS[0]}/shared_memory/") or "_distributed_c10d" in function:
        return "waiting"
    if file.startswith(OURS):
        return "ours"
    return "torch" if file.startswith(TORCH) else "operators" if file == "~" else "library"


def _run(case: str, size: str, steps: int) -> dict[str, Any]:
    sizes = SIZES[size]
    optimizer = {"optimizer.lr": LR, "optimizer.schedule": "constant", "optimizer.clip": CLIP}
    batch = {"microbatches": sizes.microbatches if case in ("gpipe", "1f1b") else 1}
    config = tiny_config({**sizes.overrides, **optimizer, **batch, **OVERRIDES[case]})
    training = build(config, resolve(config), torch.device("cpu"))
    scaler = LossScaler(config.precision, scaled=False)
    number = 0

    def step() -> None:
        nonlocal number
        number += 1
        train_step(training, number, LR, scaler)

    for _ in range(5):
        step()
    with CommunicationCounter(training.mesh) as counter:
        step()
    with HostReads() as reads:
        step()
    calls = count_calls(step)
    seconds = shares(step, steps)
    return {
        "case": case,
        "size": size,
        "collectives": {f"{row.axis} {row.purpose}: {row.operation}": row.calls for row in counter.rows()},
        "host_reads": dict(reads.found),
        "calls": sum(count for name, count in calls.items() if " calls " not in name),
        "seconds": seconds,
    }


def main() -> None:
    arguments = read_arguments(__doc__, "native-python", OVERRIDES, ("small",), steps="30")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows = []
    print(f"{'case':9}{'ms':>7}{'ours':>8}{'torch':>8}{'reading':>9}{'calls':>7}{'reads':>7}  collectives")
    for case in arguments.case.split(","):
        for size in arguments.size.split(","):
            world = {"single": 1, "2d": 4}.get(case, 2)
            row = on_ranks(world, _run, case, size, int(arguments.steps))
            rows.append(row)
            seconds = row["seconds"]
            busy = sum(seconds.values()) - seconds.get("waiting", 0.0)
            found = {kind: seconds.get(kind, 0.0) / busy for kind in ("ours", "torch", "reading")}
            row["shares"] = found
            collectives = ", ".join(f"{count} {name}" for name, count in row["collectives"].items())
            print(
                f"{case:9}{busy * 1e3:7.1f}{found['ours']:8.1%}{found['torch']:8.1%}{found['reading']:9.1%}"
                f"{row['calls']:7}{sum(row['host_reads'].values()):7}  {collectives}",
                flush=True,
            )
    if arguments.name:
        command = f"python -m benchmarks.native_python --case {arguments.case} --size {arguments.size}"
        print("written to", write(arguments.name, {"command": command}, rows))


if __name__ == "__main__":
    main()
