"""Shared memory against gloo between ranks of one host: each collective, and a whole training step, paired.

    python -m benchmarks.shared_memory                                    # collectives at 2 and 4 ranks, steps at 2
    python -m benchmarks.shared_memory --case all_reduce --pairs 30 --ranks 2

Both sides run in the same processes and alternate: one group uses shared memory, the other gloo. Steps are those of
`benchmarks.native`'s mixed size, by our strategies. Sizes of collectives are the bytes of the full-size buffer.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.pairs import on_ranks, read_arguments, summarise, time_pairs, write
from benchmarks.plain_gpt import SIZES
from parallelrun.distributed import shared_memory
from parallelrun.planner.resolve.resolve_config import resolve
from parallelrun.training.loop.build import Training, build
from parallelrun.training.loop.schedules import LossScaler
from parallelrun.training.loop.step import train_step
from tests.plans import tiny_config

RANKS_OF_STEPS = 2
BYTES = {"4K": 2**12, "256K": 2**18, "16M": 2**24}
STEPS: dict[str, dict[str, Any]] = {
    "ddp": {"dp": 2, "strategy.data.kind": "ddp", "microbatches": 1},
    "fsdp": {"dp": 2, "strategy.data.kind": "fsdp", "microbatches": 1},
    "tp": {"tp": 2, "microbatches": 1},
    "pp": {"pp": 2, "strategy.pipeline.kind": "1f1b"},
}


def _all_reduce(group: Any, tensor: torch.Tensor, parts: torch.Tensor) -> None:
    dist.all_reduce(tensor, group=group)


def _all_gather(group: Any, tensor: torch.Tensor, parts: torch.Tensor) -> None:
    dist.all_gather_into_tensor(tensor, parts[dist.get_rank()], group=group)


def _reduce_scatter(group: Any, tensor: torch.Tensor, parts: torch.Tensor) -> None:
    dist.reduce_scatter_tensor(parts[dist.get_rank()], tensor, group=group)


def _all_to_all(group: Any, tensor: torch.Tensor, parts: torch.Tensor) -> None:
    dist.all_to_all_single(parts.view(-1), tensor, group=group)


def _broadcast(group: Any, tensor: torch.Tensor, parts: torch.Tensor) -> None:
    dist.broadcast(tensor, 0, group=group)


def _messages(group: Any, tensor: torch.Tensor, parts: torch.Tensor) -> None:
    """From every rank to the next one."""
    rank, world = dist.get_rank(), dist.get_world_size()
    received = dist.irecv(parts.view(-1), (rank - 1) % world, group=group)
    sent = dist.isend(tensor, (rank + 1) % world, group=group)
    assert sent is not None and received is not None
    received.wait()
    sent.wait()


COLLECTIVES: dict[str, Callable[[Any, torch.Tensor, torch.Tensor], None]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "messages": _messages,
}
_REPEATED = {"4K": 20, "256K": 10, "16M": 1}  # calls that are timed together


def _collective(name: str, size: str, pairs: int, warmup: int) -> dict[str, Any]:
    """One rank: the same call over both groups."""
    shared, gloo = dist.new_group(backend=shared_memory.register()), dist.new_group(backend="gloo")
    assert shared_memory.carrier(shared) == "shm"
    tensor = torch.zeros(BYTES[size] // 4)  # zeros: summed again and again, other numbers would overflow
    parts = torch.zeros(dist.get_world_size(), tensor.numel() // dist.get_world_size())

    def calls(group: Any) -> None:
        for _ in range(_REPEATED[size]):
            COLLECTIVES[name](group, tensor, parts)

    times = time_pairs(partial(calls, shared), partial(calls, gloo), pairs, warmup)
    return {"times": {side: [one / _REPEATED[size] for one in values] for side, values in times.items()}}


def _steps(name: str, pairs: int, warmup: int) -> dict[str, Any]:
    """Two worlds of processes, one per backend, take turns; equal losses prove equal work."""
    context, sides = mp.get_context("spawn"), ("shm", "gloo")
    turn, answers = context.Barrier(2 * RANKS_OF_STEPS), context.Queue()
    with tempfile.TemporaryDirectory() as scratch:
        arguments = [(name, side, rank, scratch, pairs, warmup, turn, answers) for side in sides for rank in range(2)]
        processes = [context.Process(target=_take_turns, args=one) for one in arguments]
        for process in processes:
            process.start()
        found = [answers.get(timeout=1200) for _ in processes]
        for process in processes:
            process.join()
    losses = {side: [loss for one in found if one["side"] == side and one["rank"] == 0 for loss in one["losses"]]
              for side in sides}  # fmt: skip
    worst = max(abs(a - b) / abs(b) for a, b in zip(losses["shm"], losses["gloo"]))
    assert worst < 1e-4, f"{name}: the two sides do not train alike: {losses}"
    times = {key: [max(values) for values in zip(*(one["times"][key] for one in found if key in one["times"]))]
             for key in ("ours", "theirs", "again")}  # fmt: skip
    cpu = {side: sum(statistics.median(one["cpu"]) for one in found if one["side"] == side) for side in sides}
    return {"first_losses": losses, "times": times, "cpu_s_of_all_ranks": cpu}


def _take_turns(
    name: str, side: str, rank: int, scratch: str, pairs: int, warmup: int, turn: Any, answers: Any
) -> None:
    """One rank of one side: a step whenever it is this side's turn."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(f"{scratch}/{side}", RANKS_OF_STEPS)  # type: ignore[attr-defined]
    dist.init_process_group(shared_memory.register() if side == "shm" else side, store=store, rank=rank, world_size=2)
    step = _stepper(name)
    losses = [step() for _ in range(3)]
    mine = ("ours",) if side == "shm" else ("theirs", "again")
    times: dict[str, list[float]] = {key: [] for key in mine}
    cpu: list[float] = []
    order = ["ours", "theirs", "again"]
    for number in range(warmup + pairs):
        for key in order:
            turn.wait()
            if key in mine:
                dist.barrier()
                began, used = time.perf_counter(), time.process_time()
                step()
                if number >= warmup:
                    times[key].append(time.perf_counter() - began)
                    cpu.append(time.process_time() - used)
        order = order[1:] + order[:1]
    answers.put({"side": side, "rank": rank, "losses": losses, "times": times, "cpu": cpu})
    turn.wait()
    dist.destroy_process_group()


def _stepper(name: str) -> Callable[[], float]:
    sizes = SIZES["mixed"]
    config = tiny_config({**sizes.overrides, "microbatches": sizes.microbatches, **STEPS[name]})
    training: Training = build(config, resolve(config), torch.device("cpu"))
    scaler, state = LossScaler(config.precision, scaled=False), {"step": 0}

    def step() -> float:
        state["step"] += 1
        return train_step(training, state["step"], 1e-3, scaler).loss

    return step


def main() -> None:
    arguments = read_arguments(__doc__, "shared_memory", (*COLLECTIVES, *STEPS), BYTES, ranks="2,4")
    rows = []
    print(f"{'case':32}{'shm ms':>9}{'gloo ms':>11}{'ratio':>8}{'95 %':>12}{'A/A':>7}")
    for case in arguments.case.split(","):
        for world in map(int, arguments.ranks.split(",")):
            for size in arguments.size.split(",") if case in COLLECTIVES else ("mixed",):
                if case in STEPS and world != RANKS_OF_STEPS:
                    continue
                if case in STEPS:
                    result = _steps(case, arguments.pairs, arguments.warmup)
                else:
                    result = on_ranks(world, _collective, case, size, arguments.pairs, arguments.warmup)
                row = {"case": f"{case}, {world} ranks", "ranks": world, "size": size, **result}
                row |= summarise(result["times"], None)
                interval = f"{row['ratio_low']:.2f}-{row['ratio_high']:.2f}"
                print(
                    f"{row['case'] + ', ' + size:32}{row['ours_median_s'] * 1e3:9.3f}"
                    f"{row['theirs_median_s'] * 1e3:11.3f}{row['ratio']:8.2f}{interval:>12}{row['a_a_ratio']:7.2f}",
                    flush=True,
                )
                if "cpu_s_of_all_ranks" in row:
                    shm, gloo = row["cpu_s_of_all_ranks"].values()
                    print(f"{'  CPU time of both ranks':32}{shm * 1e3:9.1f}{gloo * 1e3:11.1f}{shm / gloo:8.2f}")
                rows.append(row)
    if arguments.name:
        command = f"python -m benchmarks.shared_memory --case {arguments.case} --ranks {arguments.ranks}"
        print("written to", write(arguments.name, {"command": f"{command} --pairs {arguments.pairs}"}, rows))


if __name__ == "__main__":
    main()
