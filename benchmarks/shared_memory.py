"""Shared memory against gloo between ranks of one host: each collective, and a whole training step, paired.

    python -m benchmarks.shared_memory                                    # collectives at 2 and 4 ranks, steps at 2
    python -m benchmarks.shared_memory --case all_reduce --pairs 30 --ranks 2

Both sides run in the same processes and alternate: one group uses shared memory, the other gloo. Steps are those of
`benchmarks.native`'s mixed size, by our strategies. Sizes of collectives are the bytes of the full-size buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.pairs import on_ranks, read_arguments, summarise, time_pairs, write
from benchmarks.plain_gpt import SIZES
from parallelrun import shared_memory
from parallelrun.plan.resolve import resolve
from parallelrun.train.build import Training, build
from parallelrun.train.schedules import LossScaler
from parallelrun.train.step import train_step
from tests.plans import tiny_config

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
    sent = dist.isend(tensor, (rank + 1) % world, group=group)
    dist.recv(parts.view(-1), (rank - 1) % world, group=group)
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
    shared, gloo = dist.new_group(backend=shared_memory.register()), dist.group.WORLD
    assert shared_memory.is_shared(shared), shared_memory.refusal()
    tensor = torch.zeros(BYTES[size] // 4)  # zeros: summed again and again, other numbers would overflow
    parts = torch.zeros(dist.get_world_size(), tensor.numel() // dist.get_world_size())

    def calls(group: Any) -> None:
        for _ in range(_REPEATED[size]):
            COLLECTIVES[name](group, tensor, parts)

    times = time_pairs(partial(calls, shared), partial(calls, gloo), pairs, warmup)
    return {"times": {side: [one / _REPEATED[size] for one in values] for side, values in times.items()}}


def _step(name: str, pairs: int, warmup: int) -> dict[str, Any]:
    """One rank: two trainings of the same plan, one over each backend; equal losses prove equal work."""
    first = _stepper(name)
    gloo_world, store = dist.group.WORLD, dist.distributed_c10d._get_default_store()
    raise NotImplementedError(gloo_world, store, first)


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
                if case in STEPS and world > 2:
                    continue
                body = partial(_collective, case, size) if case in COLLECTIVES else partial(_step, case)
                result = on_ranks(world, body, arguments.pairs, arguments.warmup)
                row = {"case": f"{case}, {world} ranks", "ranks": world, "size": size, **result}
                row |= summarise(result["times"], None)
                interval = f"{row['ratio_low']:.2f}-{row['ratio_high']:.2f}"
                print(
                    f"{row['case'] + ', ' + size:32}{row['ours_median_s'] * 1e3:9.3f}"
                    f"{row['theirs_median_s'] * 1e3:11.3f}{row['ratio']:8.2f}{interval:>12}{row['a_a_ratio']:7.2f}",
                    flush=True,
                )
                rows.append(row)
    if arguments.name:
        command = f"python -m benchmarks.shared_memory --case {arguments.case} --ranks {arguments.ranks}"
        print("written to", write(arguments.name, {"command": f"{command} --pairs {arguments.pairs}"}, rows))


if __name__ == "__main__":
    main()
