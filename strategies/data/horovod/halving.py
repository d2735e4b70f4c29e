"""The predicted exchange of Adasum: vector halving, distance doubling.

At level k a rank and the rank whose number differs in bit k have the same part of two vectors. Each gives the other one
half of it and combines the other half. For that, the 2^(k+1) ranks that have parts of the same two vectors sum their
dot products, in k + 1 swaps between pairs. At the end the parts are gathered in reverse order.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from parallelrun.planner.contract.collective import Collective

from ..common.allreduce.rounds import Number, halved, halvings

NUM_DOTS = 3  # a.b, |a|^2, |b|^2 of every tensor
DOT_BYTES = 8  # fp64


def message_rows(
    vectors: Sequence[tuple[int, int]], size: int, index: int, element_bytes: int, axis: str
) -> list[Collective]:
    """The messages of member `index` that combine vectors, each (its elements, the tensors in it)."""
    levels, calls, payload = size.bit_length() - 1, 0, 0
    for numel, num_tensors in vectors:
        swaps = levels * (levels + 1) // 2  # of dot products: k + 1 at level k
        calls += 2 * levels + swaps
        payload += sent_elements(numel, size, index) * element_bytes + swaps * NUM_DOTS * DOT_BYTES * num_tensors
    return [
        Collective(axis, "send", "parameters", calls, payload),
        Collective(axis, "recv", "parameters", calls, 0),
    ]


def sent_elements(numel: int, size: int, index: Number) -> Number:
    """Elements that member `index` (or each of an array) sends: at each level both halves of a part."""
    return sum(halved(numel, level, index) for level in range(size.bit_length() - 1))


def update_bytes(lengths: Sequence[int], size: int, index: int, sent: int, stored: int) -> int:
    """Bytes that member `index` needs to combine an update of tensors of those lengths. sent, stored: of an element.

    The update, and either its copy in the stored dtype or the half that the first partner gives with the largest
    tensor's parts in fp64 for their dot products (of fp64 itself the three terms of a sum) or the next one's quarter.
    """
    numel = sum(lengths)
    low, high = halvings(numel, size, index)[0].keep
    spans = pairwise(accumulate(lengths, initial=0))
    largest = max(min(stop, high) - max(start, low) for start, stop in spans)
    products = (3 if sent == DOT_BYTES else 2) * DOT_BYTES * largest
    quarter = -(-numel // 4) * sent if size > 2 else 0
    converted = numel * stored if sent != stored else 0
    return numel * sent + max(converted, (high - low) * sent + max(products, quarter))
