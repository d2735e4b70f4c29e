"""The written-out all-reduces, in shared memory, against gloo's own: the exchange alone, and a training step, paired.

    python -m benchmarks.ring                                   # every case, 40 pairs each
    python -m benchmarks.ring --case all_reduce --pairs 30 --ranks 2

all_reduce: 16 MiB of fp32 gradients summed in place. step: a full step of strategy=ring beside strategy=ddp, the same
weights, samples and optimizer, 16 MB of gradients in buckets of 4 MB under backward, both in shared memory. One
thread a rank, in both.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.pairs import on_ranks, peers_on_gloo, read_arguments, summarise, time_pairs, write
from parallelrun.distributed.mesh import Group
from parallelrun.planner.resolve.resolve_config import resolve
from parallelrun.strategies.data.common.allreduce.rings import HierarchicalAllReduce, RingAllReduce
from parallelrun.strategies.data.common.allreduce.runtime import all_reduce
from parallelrun.strategies.data.common.allreduce.trees import HalvingDoubling
from parallelrun.training.loop.build import Training, build
from parallelrun.training.loop.schedules import LossScaler
from parallelrun.training.loop.step import train_step
from tests.plans import tiny_config

BARS = {"all_reduce": 0.50, "step": 1.30}
NUMEL = 4 * 2**20  # 16 MiB of fp32
ALGORITHMS = ("ring", "halving_doubling", "hierarchical")
# 4.2 million parameters: 16 MB of gradients; few samples, so that most of the step is the exchange
MODEL = {
    "model.layers": 5,
    "model.hidden": 256,
    "model.heads": 8,
    "model.seq": 32,
    "model.vocab": 512,
    "dataset.vocab": 512,
    "dataset.samples": 512,
    "strategy.data.bucket_mb": 4.0,
    "optimizer.lr": 1e-3,
    "optimizer.schedule": "constant",
}


def _exchange(algorithm: str, pairs: int, warmup: int) -> dict[str, Any]:
    """One rank: both sides sum the same numbers; equal sums prove equal work."""
    world, rank = dist.get_world_size(), dist.get_rank()
    group = Group("dp", tuple(range(world)), rank, dist.group.WORLD)
    in_groups = HierarchicalAllReduce(max(1, world // 2))
    chosen = next(one for one in (RingAllReduce(), HalvingDoubling(), in_groups) if one.name == algorithm)
    rounds = chosen.rounds(world, rank, NUMEL)
    written_out = partial(all_reduce, group=group, purpose="gradients", rounds=rounds)
    numbers = torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank))
    ours, theirs = numbers.clone(), numbers.clone()
    with peers_on_gloo() as gloo:
        gloo_sum = partial(dist.all_reduce, theirs, group=gloo)
    written_out(ours)
    gloo_sum()
    assert torch.allclose(ours, theirs, atol=1e-5), f"{algorithm}: the sums differ"
    ours.zero_()  # summing the same tensor again and again would overflow
    theirs.zero_()
    return {"times": time_pairs(lambda: written_out(ours), gloo_sum, pairs, warmup)}


def _stepper(kind: str, world: int) -> tuple[Training, Callable[[], float]]:
    config = tiny_config({**MODEL, "dp": world, "global_batch": 2 * world, "strategy.data.kind": kind})
    training = build(config, resolve(config), torch.device("cpu"))
    scaler, state = LossScaler(config.precision, scaled=False), {"step": 0}

    def step() -> float:
        state["step"] += 1
        return train_step(training, state["step"], 1e-3, scaler).loss

    return training, step


def _step(pairs: int, warmup: int) -> dict[str, Any]:
    """One rank: both ways from the same weights, on the same samples."""
    world = dist.get_world_size()
    training, ours = _stepper("ring", world)
    _, theirs = _stepper("ddp", world)
    losses = {"ours": [ours() for _ in range(3)], "theirs": [theirs() for _ in range(3)]}
    worst = max(abs(a - b) / abs(b) for a, b in zip(losses["ours"], losses["theirs"]))
    assert worst < 1e-4, f"the two sides do not train alike: {losses}"
    parameters = training.plan.spec.num_parameters
    return {"parameters": parameters, "first_losses": losses, "times": time_pairs(ours, theirs, pairs, warmup)}


def _measure(case: str, world: int, algorithm: str, pairs: int, warmup: int) -> dict[str, Any]:
    arguments = (_step, pairs, warmup) if case == "step" else (_exchange, algorithm, pairs, warmup)
    result = on_ranks(world, *arguments)
    row = {"case": f"{case} {algorithm}, {world} ranks", "ranks": world, "algorithm": algorithm, **result}
    row |= summarise(result["times"], BARS[case] if algorithm == "ring" else None)
    interval = f"{row['ratio_low']:.2f}-{row['ratio_high']:.2f}"
    verdict = {True: f"holds <= {BARS[case]}", False: f"DOES NOT HOLD <= {BARS[case]}"}
    print(
        f"{row['case']:38}{row['ours_median_s'] * 1e3:9.1f}{row['theirs_median_s'] * 1e3:11.1f}{row['ratio']:8.2f}"
        f"{interval:>12}{row['a_a_ratio']:7.2f}  {verdict.get(row['holds'], '')}",
        flush=True,
    )
    return row


def main() -> None:
    arguments = read_arguments(__doc__, "ring", ("all_reduce", "step"), ranks="2,4")
    rows = []
    print(f"{'case':38}{'ours ms':>9}{'theirs ms':>11}{'ratio':>8}{'95 %':>12}{'A/A':>7}")
    for case in arguments.case.split(","):
        for world in map(int, arguments.ranks.split(",")):
            for algorithm in ALGORITHMS if case == "all_reduce" else ALGORITHMS[:1]:
                if algorithm != "hierarchical" or world > 2:  # of two ranks it is a ring
                    rows.append(_measure(case, world, algorithm, arguments.pairs, arguments.warmup))
    if arguments.name:
        command = f"python -m benchmarks.ring --case {arguments.case} --ranks {arguments.ranks}"
        print("written to", write(arguments.name, {"command": f"{command} --pairs {arguments.pairs}"}, rows))


if __name__ == "__main__":
    main()
