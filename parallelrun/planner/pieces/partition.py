"""Partition of a model's blocks into pipeline stages: by cost (exact min-max), uniformly, or as the user lists."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, islice, pairwise

from parallelrun.base import spelling
from parallelrun.base.errors import Problem
from parallelrun.base.wording import divisors
from parallelrun.config.schema.run_schema import Config
from parallelrun.planner.model.model_spec import BlockSpec, ModelSpec


def partition(costs: list[float], num_stages: int) -> list[int]:
    """Sizes of `num_stages` non-empty contiguous parts of `costs` (>= 0) whose largest sum is the smallest possible.

    Ties are broken by the least sum of squared part costs, which makes the lighter stages even too. Exact: bisection
    with a greedy test finds the least bound, then a dynamic programme searches the cuts within that bound. These are
    few if costs are similar, so thousands of layers are fast.
    """
    num_blocks = len(costs)
    assert 1 <= num_stages <= num_blocks, f"{num_blocks} blocks do not make {num_stages} non-empty stages"
    prefix = [0, *accumulate(costs)]
    return _even_parts(prefix, num_stages, _least_bound(prefix, num_stages))


def _least_bound(prefix: list[float], num_stages: int) -> float:
    """The least bound on the sums of `num_stages` contiguous parts; it is the sum of one of them.

    Bisection on sums of parts: a feasible bound is lowered to the largest sum that it needs, an infeasible one is
    raised to the least sum that exceeds it.
    """
    low = max(prefix[i + 1] - prefix[i] for i in range(len(prefix) - 1))
    high = prefix[-1]
    while low < high:
        middle = max(low, (low + high) / 2) if (low + high) / 2 < high else low
        ends = _greedy_ends(prefix, middle)
        starts = [0, *ends[:-1]]
        if len(ends) <= num_stages:
            high = max(prefix[end] - prefix[start] for start, end in zip(starts, ends))
        else:
            low = min(prefix[end + 1] - prefix[start] for start, end in zip(starts, ends) if end < len(prefix) - 1)
    return high


def _greedy_ends(prefix: list[float], bound: float) -> list[int]:
    """The ends of the fewest contiguous parts of cost <= bound. No single block exceeds the bound."""
    ends, end, last = [], 0, len(prefix) - 1
    while end < last:
        start, end = end, bisect_right(prefix, prefix[end] + bound, end + 1) - 1
        while end < last and prefix[end + 1] - prefix[start] <= bound:  # a sum and a difference may round differently
            end += 1
        while end > start + 1 and prefix[end] - prefix[start] > bound:
            end -= 1
        end = max(end, start + 1)
        ends.append(end)
    return ends


def _even_parts(prefix: list[float], num_stages: int, limit: float) -> list[int]:
    """Part sizes with every part <= limit and the least sum of squares, by dynamic programming from the right.

    Cut k is not after the end of k greedy parts, and not before the begin of the other parts, greedy from the right.
    """
    num_blocks = len(prefix) - 1
    ends = [0, *_greedy_ends(prefix, limit)]
    mirrored = [prefix[-1] - cost for cost in reversed(prefix)]
    begins = [num_blocks, *(num_blocks - end for end in _greedy_ends(mirrored, limit * (1 + 1e-9)))]
    latest = [min(ends[min(k, len(ends) - 1)], num_blocks - num_stages + k) for k in range(num_stages + 1)]
    earliest = [max(begins[min(num_stages - k, len(begins) - 1)], k) for k in range(num_stages + 1)]
    best: dict[int, float] = {num_blocks: 0.0}  # first block -> least sum of squares of the parts handled so far
    choices: list[dict[int, int]] = []
    for cut in reversed(range(num_stages)):
        row: dict[int, float] = {}
        choice: dict[int, int] = {}
        for start in range(earliest[cut], latest[cut] + 1):
            for stop in range(max(start + 1, earliest[cut + 1]), latest[cut + 1] + 1):
                cost = prefix[stop] - prefix[start]
                if cost > limit:
                    break
                if stop in best and (start not in row or best[stop] + cost * cost < row[start]):
                    row[start], choice[start] = best[stop] + cost * cost, stop
        best = row
        choices.append(choice)
    sizes, start = [], 0
    for choice in reversed(choices):
        sizes.append(choice[start] - start)
        start = choice[start]
    assert start == num_blocks and min(sizes) >= 1
    return sizes


def cut(spec: ModelSpec, config: Config, num_stages: int) -> tuple[list[tuple[str, ...]], list[Problem]]:
    """(block names per stage, violations) under `strategy.pipeline.partition` and `.split`; no stages if violated."""
    section = config.strategy.pipeline
    if section.split:
        sizes = _manual(spec.blocks, list(section.split), num_stages)
    elif section.partition == "uniform":
        sizes = _uniform(spec.blocks, num_stages)
    elif most_stages(spec) < num_stages:
        sizes = []  # reported as one violation by `resolve`
    else:
        sizes = _by_cost(spec.blocks, num_stages)
    if isinstance(sizes, Problem):
        return [], [sizes]
    names = iter(block.name for block in spec.blocks)
    return [tuple(islice(names, size)) for size in sizes], []


def num_cuttable(spec: ModelSpec) -> int:
    """The largest number of stages of which each has a layer; of the model's blocks if it has no layers."""
    return min(spec.num_layers or most_stages(spec), most_stages(spec))


def most_stages(spec: ModelSpec) -> int:
    """The largest number of stages. The first may hold an embedding alone, and the last a head (Llama 3, 3.3.2)."""
    return len(_runs(spec.blocks))


def _runs(blocks: Sequence[BlockSpec]) -> list[list[BlockSpec]]:
    """The blocks in runs that one stage holds: each begins with a block that does not follow another."""
    runs: list[list[BlockSpec]] = []
    for block in blocks:
        if block.follows:
            runs[-1].append(block)
        else:
            runs.append([block])
    return runs


def _by_cost(blocks: Sequence[BlockSpec], num_stages: int) -> list[int]:
    runs = _runs(blocks)
    sizes = partition([sum(block.forward_flops for block in run) for run in runs], num_stages)
    return _num_blocks(runs, sizes)


def _num_blocks(runs: list[list[BlockSpec]], sizes: list[int]) -> list[int]:
    """From the number of runs in each stage to the number of blocks."""
    rest = iter(runs)
    return [sum(map(len, islice(rest, size))) for size in sizes]


def _uniform(blocks: tuple[BlockSpec, ...], num_stages: int) -> list[int] | Problem:
    """Equally many transformer blocks per stage; the embedding goes to the first stage, the head to the last."""
    runs = _runs(blocks)
    middle = [i for i, run in enumerate(runs) if run[0].is_recomputed] or list(range(len(runs)))
    if len(middle) % num_stages:
        message = (
            f"{len(middle)} layers are not divisible by {num_stages} stages, and partition=uniform was asked for; "
            f"numbers of stages that do: {', '.join(map(str, divisors(len(middle))))}"
        )
        where = "strategy.pipeline.partition"
        return Problem(message, where, f"{where}=cost", kind="arithmetic")
    sizes = [len(middle) // num_stages] * num_stages
    sizes[0] += middle[0]
    sizes[-1] += len(runs) - 1 - middle[-1]
    return _num_blocks(runs, sizes)


def _manual(blocks: tuple[BlockSpec, ...], split: list[str], num_stages: int) -> list[int] | Problem:
    """The stages that begin at the blocks of `split`, after a first stage that begins at the first block."""
    where = "strategy.pipeline.split"
    names = [block.name for block in blocks]
    unknown = [name for name in split if name not in names]
    if unknown:
        nearest = [
            match for name in split for match in ([name] if name in names else spelling.closest(name, names)[:1])
        ]
        message = f"the model has no block {' and no block '.join(map(repr, unknown))}"
        return Problem(message, where, f"{where}={_cuts(blocks, nearest, num_stages)}")
    if follower := next((name for name in split if blocks[names.index(name)].follows), None):
        message = f"no stage can begin at {follower}: it runs on the stage of {names[names.index(follower) - 1]}"
        return Problem(message, where, f"{where}={_cuts(blocks, [], num_stages)}", kind="undefined")
    if len(split) != num_stages - 1:
        message = f"{num_stages} stages need {num_stages - 1} cuts, and {len(split)} are given"
        return Problem(message, where, f"{where}={_cuts(blocks, split, num_stages)}", kind="arithmetic")
    starts = [0, *(names.index(name) for name in split), len(blocks)]
    sizes = [later - earlier for earlier, later in pairwise(starts)]
    if min(sizes) <= 0:
        message = f"the cuts {','.join(split)} are not in model order, so a stage would be empty"
        return Problem(message, where, f"{where}={_cuts(blocks, split, num_stages)}", kind="arithmetic")
    return sizes


def _cuts(blocks: tuple[BlockSpec, ...], split: list[str], num_stages: int) -> str:
    """`[layers.2,layers.4]`: the cuts of `split` in order if they make the stages, else those of equal costs."""
    names = [block.name for block in blocks]
    cuts = sorted(set(split) - {names[0]}, key=names.index)
    if len(cuts) != num_stages - 1 and num_stages <= len(_runs(blocks)):
        sizes = _by_cost(blocks, num_stages)
        cuts = [names[start] for start in accumulate(sizes[:-1])]
    return f"[{','.join(cuts)}]"
