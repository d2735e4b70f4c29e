"""The exchange of Adasum as a table: vector halving, distance doubling. Torch-free.

At level k a rank and the rank whose number differs in bit k hold the same part of two vectors. Each gives the other one
half of it and combines the half that it keeps. For that, the 2^(k+1) ranks that hold parts of the same two vectors sum
their dot products, in k + 1 swaps between pairs. At the end the parts are gathered in reverse order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parallelrun.plan.structure import Collective

NUM_DOTS = 3  # a.b, |a|^2, |b|^2 of every tensor
DOT_BYTES = 8  # fp64


@dataclass(frozen=True)
class HalvingLevel:
    """One halving. distance: 2^k; the rank keeps [keep) and gives [give) of the vector, as (start, stop)."""

    distance: int
    keep: tuple[int, int]
    give: tuple[int, int]


def levels(numel: int, size: int, index: int) -> tuple[HalvingLevel, ...]:
    """Return the halvings of member `index` of `size` (a power of two) for a vector of `numel` elements."""
    start, stop, distance, out = 0, numel, 1, []
    while distance < size:
        middle = start + (stop - start) // 2
        low, high = (start, middle), (middle, stop)
        keep, give = (high, low) if index & distance else (low, high)
        out.append(HalvingLevel(distance, keep, give))
        (start, stop), distance = keep, 2 * distance
    return tuple(out)


def rows(vectors: Sequence[tuple[int, int]], size: int, index: int, element_bytes: int, axis: str) -> list[Collective]:
    """Return the messages of member `index` that combine vectors, each (its elements, the tensors in it)."""
    calls = payload = 0
    for numel, num_tensors in vectors:
        for number, level in enumerate(levels(numel, size, index), start=1):
            sizes = [stop - start for start, stop in (level.give, level.keep)]  # while halving, while gathering
            calls += len(sizes) + number
            payload += sum(sizes) * element_bytes + number * NUM_DOTS * DOT_BYTES * num_tensors
    return [
        Collective(axis, "send", "parameters", calls, payload),
        Collective(axis, "recv", "parameters", calls, 0),
    ]
