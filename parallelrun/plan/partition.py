"""Cutting the ordered blocks of a model into pipeline stages: exact min-max by cost, evenly, or by hand."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate, pairwise

from parallelrun.config.schema import Config
from parallelrun.errors import Problem
from parallelrun.models.spec import BlockSpec, ModelSpec
from parallelrun.plan.names import closest


def partition(costs: list[float], num_stages: int) -> list[int]:
    """Sizes of `num_stages` non-empty contiguous parts of `costs` (>= 0) whose largest sum is the smallest possible.

    Among those, the one with the least sum of squared part costs (so the lighter stages are even too). Exact: the
    optimum is one of the interval sums, found by bisection with a greedy test; then a dynamic programme over the parts
    that do not exceed it. Costs about L^2 for L blocks, whatever the number of stages.
    """
    num_blocks = len(costs)
    assert 1 <= num_stages <= num_blocks, f"{num_blocks} blocks do not make {num_stages} non-empty stages"
    prefix = [0, *accumulate(costs)]
    sums = sorted({prefix[j] - prefix[i] for i in range(num_blocks) for j in range(i + 1, num_blocks + 1)})
    limit = sums[bisect_left(sums, True, key=lambda bound: _greedy_parts(prefix, bound) <= num_stages)]
    return _even_parts(prefix, num_stages, limit)


def _greedy_parts(prefix: list[float], bound: float) -> int:
    """The fewest contiguous parts of cost <= bound, or more than there are blocks when one block exceeds it."""
    num_blocks, start, parts = len(prefix) - 1, 0, 0
    while start < num_blocks:
        stop = start
        while stop < num_blocks and prefix[stop + 1] - prefix[start] <= bound:
            stop += 1
        if stop == start:
            return num_blocks + 1
        start, parts = stop, parts + 1
    return parts


def _even_parts(prefix: list[float], num_stages: int, limit: float) -> list[int]:
    """Part sizes with every part <= limit and the least sum of squares, by dynamic programming from the right."""
    num_blocks = len(prefix) - 1
    infinite = float("inf")
    best = [infinite] * num_blocks + [0.0]  # best[i]: blocks i.. in the number of parts handled so far
    choices: list[list[int]] = []
    for part in range(1, num_stages + 1):
        row, choice = [infinite] * (num_blocks + 1), [0] * (num_blocks + 1)
        for start in range(num_stages - part, num_blocks - part + 1):
            for stop in range(start + 1, num_blocks - part + 2):
                cost = prefix[stop] - prefix[start]
                if cost > limit:
                    break
                if best[stop] + cost * cost < row[start]:
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
    blocks = spec.blocks
    if config.strategy.pipeline.split:
        sizes, problems = _manual(blocks, list(config.strategy.pipeline.split), num_stages)
    elif config.strategy.pipeline.partition == "uniform":
        sizes, problems = _uniform(blocks, num_stages)
    else:
        sizes, problems = _by_cost(spec, num_stages)
    if problems:
        return [], problems
    stops = list(accumulate(sizes))
    names = [block.name for block in blocks]
    return [tuple(names[stop - size : stop]) for size, stop in zip(sizes, stops)], []


def num_cuttable(spec: ModelSpec) -> int:
    """The most stages a model can be cut into: its layers, or its blocks if it has no layers."""
    return min(spec.num_layers or len(spec.blocks), len(spec.blocks))


def _by_cost(spec: ModelSpec, num_stages: int) -> tuple[list[int], list[Problem]]:
    if num_cuttable(spec) < num_stages:
        return [], []  # reported as one violation by `resolve`
    return partition([block.forward_flops for block in spec.blocks], num_stages), []


def _uniform(blocks: tuple[BlockSpec, ...], num_stages: int) -> tuple[list[int], list[Problem]]:
    """As many transformer blocks on every stage; what precedes them goes to the first, what follows to the last."""
    middle = [i for i, block in enumerate(blocks) if block.kind not in ("embedding", "head")]
    if not middle:
        middle = list(range(len(blocks)))
    if len(middle) % num_stages:
        legal = [n for n in range(1, len(middle) + 1) if len(middle) % n == 0]
        return [], [
            Problem(
                f"{len(middle)} layers do not divide by {num_stages} stages, and partition=uniform was asked for; "
                f"numbers of stages that do: {', '.join(map(str, legal))}",
                "strategy.pipeline.partition",
                "strategy.pipeline.partition=cost",
                kind="arithmetic",
            )
        ]
    each = len(middle) // num_stages
    sizes = [each] * num_stages
    sizes[0] += middle[0]
    sizes[-1] += len(blocks) - 1 - middle[-1]
    return sizes, []


def _manual(blocks: tuple[BlockSpec, ...], split: list[str], num_stages: int) -> tuple[list[int], list[Problem]]:
    """The first block of every stage but the first, in model order."""
    where = "strategy.pipeline.split"
    names = [block.name for block in blocks]
    unknown = [name for name in split if name not in names]
    if unknown:
        nearest = [name if name in names else closest(name, names)[0] for name in split]
        what = f"the model has no block {' and no block '.join(map(repr, unknown))}"
        return [], [Problem(what, where, f"{where}=[{','.join(nearest)}]")]
    if len(split) != num_stages - 1:
        what = f"{num_stages} stages need {num_stages - 1} cuts, and {len(split)} are given"
        return [], [Problem(what, where, f"leave {where} out", kind="arithmetic")]
    starts = [0, *(names.index(name) for name in split)]
    if any(later <= earlier for earlier, later in pairwise(starts)):
        ordered = ",".join(sorted(set(split) - {names[0]}, key=names.index))
        what = f"the cuts {','.join(split)} are not in model order, so a stage would be empty"
        return [], [Problem(what, where, f"{where}=[{ordered}]", kind="arithmetic")]
    return [later - earlier for earlier, later in zip(starts, [*starts[1:], len(blocks)])], []
