"""The degrees that a preset gives to several axes (`strategy.fill_order`). Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from math import prod

from parallelrun.config.schema import StrategyConfig
from parallelrun.wording import divisors

Sizes = dict[str, int]


def axes(strategy: StrategyConfig) -> list[str]:
    """The axes that a preset fills, the first one first: `fill_order`, or the preset's own axis alone."""
    return list(strategy.fill_order) or [strategy.own_axis]


def choices(strategy: StrategyConfig, open_axes: Sequence[str], ranks: int, per_host: int) -> list[Sizes]:
    """All degrees of `open_axes` whose product is `ranks`, the best ones first.

    A tensor-parallel group must fit in a host of `per_host` ranks. The best choice gives every axis at least its degree
    in the preset's demonstration plan, then makes the first axis as large as possible, then the second.
    """
    *first, last = open_axes
    if not first:
        return [{last: ranks}]
    found = []
    for degrees in product(*(divisors(ranks) for _ in first)):
        rest, indivisible = divmod(ranks, prod(degrees))
        sizes = {**dict(zip(first, degrees)), last: rest}
        if not indivisible and rest and per_host % sizes.get("tp", 1) == 0:
            found.append(sizes)
    return sorted(found, key=lambda sizes: (_missing(strategy, sizes), *(-sizes[axis] for axis in open_axes)))


def _missing(strategy: StrategyConfig, sizes: Sizes) -> int:
    """The number of axes that are smaller than in the demonstration plan."""
    return sum(degree < strategy.demo.get(axis, 1) for axis, degree in sizes.items())


def first_legal(candidates: Sequence[Sizes], num_problems: Callable[[Sizes], int]) -> tuple[Sizes, bool]:
    """(the first candidate without violations, True); if there is none, (the one with the fewest, False)."""
    if len(candidates) == 1:
        return candidates[0], True
    fewest, best = None, candidates[0]
    for sizes in candidates:
        count = num_problems(sizes)
        if count == 0:
            return sizes, True
        if fewest is None or count < fewest:
            fewest, best = count, sizes
    return best, False
