"""The all-reduce algorithms of 2 log2(n) rounds: halving-doubling and the binomial tree."""

from __future__ import annotations

from dataclasses import dataclass, field

from .algorithm import Algorithm, Counts
from .rounds import ALL_GATHER, SCATTER_REDUCE, Number, Round, Rounds, Span, halved, halvings, message


@dataclass(frozen=True)
class HalvingDoubling(Algorithm):
    """Vector halving, distance doubling, and back.

    Members beyond a power of two: each odd one among the first pairs gives its vector to the even one before it, waits,
    and gets the result. Every segment is summed by one rank and copied, so all have the same bits.
    """

    text = (
        "Partners at distance 1, 2, 4, ... exchange halves of what is left and add them; then the same partners give "
        "the sums back in reverse order. The ring's bytes in 2 log2(n) rounds.",
        "Rabenseifner 2004; Thakur, Rabenseifner and Gropp 2005",
    )

    name: str = field(default="halving_doubling", init=False)

    def rounds(self, size: int, index: int, numel: int) -> Rounds:
        core, extra = split_size(size)
        vector: Span = (0, numel)
        if index < 2 * extra and index % 2:
            num_idle = core.bit_length() - 1
            reducing, gathering = [(Round(phase, None, None),) * num_idle for phase in (SCATTER_REDUCE, ALL_GATHER)]
            full = message(index - 1, vector)
            return (Round(SCATTER_REDUCE, full, None), *reducing, *gathering, Round(ALL_GATHER, None, full))
        own_index = index // 2 if index < 2 * extra else index - extra
        halving, doubling = [], []
        for step in halvings(numel, core, own_index):
            partner = own_index ^ step.distance
            peer = 2 * partner if partner < extra else partner + extra
            halving.append(Round(SCATTER_REDUCE, message(peer, step.give), message(peer, step.keep)))
            doubling.append(Round(ALL_GATHER, message(peer, step.keep), message(peer, step.give)))
        middle = (*halving, *reversed(doubling))
        if not extra:
            return middle
        other = message(index + 1, vector) if index < 2 * extra else None
        return (Round(SCATTER_REDUCE, None, other), *middle, Round(ALL_GATHER, other, None))

    def counts(self, size: int, index: Number, numel: int) -> Counts:
        """Both members of a pair send the complete vector once; the odd one of them takes part in no halving."""
        core, extra = split_size(size)
        is_paired = index < 2 * extra
        is_idle, own_index = is_paired * (index % 2), index - extra + is_paired * (extra - (index + 1) // 2)
        sends, elements = 0, 0
        for level in range(core.bit_length() - 1):
            before, keep = halved(numel, level, own_index), halved(numel, level + 1, own_index)
            sends += 1 * (keep > 0) + (before > keep)
            elements += before
        sends = (1 - is_idle) * sends + is_paired * (numel > 0)
        return Counts(sends, (1 - is_idle) * elements + is_paired * numel, sends)


@dataclass(frozen=True)
class TreeAllReduce(Algorithm):
    """Reduce up a binomial tree to member 0, then broadcast down it."""

    text = (
        "Sums go up a binomial tree to the first rank, and the total comes down the same way. 2 log2(n) rounds, but "
        "every message is the whole buffer: good for small ones.",
        "Thakur, Rabenseifner and Gropp 2005",
    )

    name: str = field(default="tree", init=False)

    def rounds(self, size: int, index: int, numel: int) -> Rounds:
        up, down, distance = [], [], 1
        while distance < size:
            child = index + distance if index % (2 * distance) == 0 and index + distance < size else None
            parent = index - distance if index % (2 * distance) == distance else None
            from_child = None if child is None else message(child, (0, numel))
            to_parent = None if parent is None else message(parent, (0, numel))
            up.append(Round(SCATTER_REDUCE, to_parent, from_child))
            down.append(Round(ALL_GATHER, from_child, to_parent))
            distance *= 2
        return (*up, *reversed(down))

    def counts(self, size: int, index: Number, numel: int) -> Counts:
        neighbours, distance = 1 * (index > 0), 1
        while distance < size:
            neighbours = neighbours + (index % (2 * distance) == 0) * (index + distance < size)
            distance *= 2
        sends = neighbours * (numel > 0)
        return Counts(sends, neighbours * numel, sends)


def split_size(size: int) -> tuple[int, int]:
    """(the largest power of two up to `size`, the number of members beyond it)."""
    core = 1 << (size.bit_length() - 1)
    return core, size - core
