"""The exchange of Adasum as a table: vector halving, distance doubling. Torch-free.

At level k a rank and the rank whose number differs in bit k hold the same part of two vectors. Each gives the other one
half of it and combines the half that it keeps. For that, the 2^(k+1) ranks that hold parts of the same two vectors sum
their dot products, in k + 1 swaps between pairs. At the end the parts are gathered in reverse order.
"""

from __future__ import annotations

from collections.abc import Sequence

from parallelrun.plan.structure import Collective

from ..common.allreduce.rounds import halvings

NUM_DOTS = 3  # a.b, |a|^2, |b|^2 of every tensor
DOT_BYTES = 8  # fp64


def rows(vectors: Sequence[tuple[int, int]], size: int, index: int, element_bytes: int, axis: str) -> list[Collective]:
    """Return the messages of member `index` that combine vectors, each (its elements, the tensors in it)."""
    calls = payload = 0
    for numel, num_tensors in vectors:
        for number, one in enumerate(halvings(numel, size, index), start=1):
            sizes = [stop - start for start, stop in (one.give, one.keep)]  # while halving, while gathering
            calls += len(sizes) + number
            payload += sum(sizes) * element_bytes + number * NUM_DOTS * DOT_BYTES * num_tensors
    return [
        Collective(axis, "send", "parameters", calls, payload),
        Collective(axis, "recv", "parameters", calls, 0),
    ]
