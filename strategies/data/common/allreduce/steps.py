"""The messages of all-reduce algorithms by round: one table per rank. Torch-free.

A table is a tuple of Rounds. In every round a rank sends at most one message and receives at most one; it may send once
it has received the messages of all earlier rounds. `runtime` executes the tables, `counts` counts them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

RING, HALVING_DOUBLING, HIERARCHICAL, TREE, NATIVE = "ring", "halving_doubling", "hierarchical", "tree", "native"
ALGORITHMS = (NATIVE, RING, HALVING_DOUBLING, HIERARCHICAL, TREE)  # native: the backend's own, no table
SCATTER_REDUCE, ALL_GATHER = "scatter_reduce", "all_gather"  # what arrives is added; what arrives is the sum
Span = tuple[int, int]
PIECE_BYTES = 2**21  # on gloo a message goes in pieces of up to so many bytes: smaller ones cost more than they hide


class PeerMessage(NamedTuple):
    """Elements [start, stop) of the flat tensor, to or from the group's member number `peer`."""

    peer: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Round:
    """One rank's part in one round of a phase. None: no message (an empty segment, or no peer)."""

    phase: str
    send: PeerMessage | None
    receive: PeerMessage | None


def table(algorithm: str, size: int, index: int, numel: int, group_size: int = 1) -> tuple[Round, ...]:
    """The rounds of member `index` of a group of `size` for a tensor of `numel` elements.

    algorithm: ring | halving_doubling | hierarchical | tree; group_size: hierarchical only, members of an inner group
    (that many consecutive ones; it divides `size`).
    """
    assert 0 <= index < size and numel >= 0
    if algorithm == RING:
        return _ring(range(size), index, (0, numel))
    if algorithm == HALVING_DOUBLING:
        return _halving_doubling(size, index, numel)
    if algorithm == TREE:
        return _tree(size, index, numel)
    assert algorithm == HIERARCHICAL, f"{algorithm} has no table"
    return _hierarchical(size, index, numel, group_size)


def segments(start: int, stop: int, parts: int) -> tuple[Span, ...]:
    """Cut [start, stop) into `parts` spans; the first are longer by one where it does not divide (Baidu's rule)."""
    base, longer = divmod(stop - start, parts)
    edges = [start + i * base + min(i, longer) for i in range(parts + 1)]
    return tuple(pairwise(edges))


def piece_elements(element_bytes: int) -> int:
    """Elements of a full piece of a message on gloo."""
    return max(1, PIECE_BYTES // element_bytes)


def pieces(message: PeerMessage, limit: int) -> Iterator[PeerMessage]:
    """The message in pieces of up to `limit` elements, in order."""
    for start in range(message.start, message.stop, limit):
        yield PeerMessage(message.peer, start, min(start + limit, message.stop))


def _message(peer: int, span: Span) -> PeerMessage | None:
    return PeerMessage(peer, *span) if span[0] < span[1] else None


def _scatter_reduce(members: Sequence[int], index: int, span: Span) -> tuple[Round, ...]:
    """n - 1 rounds; member i ends with segment i + 1 summed."""
    size, cut = len(members), segments(*span, len(members))
    after, before = members[(index + 1) % size], members[index - 1]
    return tuple(
        Round(
            SCATTER_REDUCE,
            _message(after, cut[(index - number) % size]),
            _message(before, cut[(index - number - 1) % size]),
        )
        for number in range(size - 1)
    )


def _all_gather(members: Sequence[int], index: int, span: Span) -> tuple[Round, ...]:
    """n - 1 rounds; member i begins with segment i + 1 and ends with all of the span."""
    size, cut = len(members), segments(*span, len(members))
    after, before = members[(index + 1) % size], members[index - 1]
    return tuple(
        Round(
            ALL_GATHER,
            _message(after, cut[(index + 1 - number) % size]),
            _message(before, cut[(index - number) % size]),
        )
        for number in range(size - 1)
    )


def _ring(members: Sequence[int], index: int, span: Span) -> tuple[Round, ...]:
    """Gibiansky, "Bringing HPC techniques to deep learning", 2017 (Baidu); Patarasuk and Yuan 2009."""
    return _scatter_reduce(members, index, span) + _all_gather(members, index, span)


def _hierarchical(size: int, index: int, numel: int, group_size: int) -> tuple[Round, ...]:
    """Scatter-reduce inside the group, a ring across groups among those who own the same segment, all-gather inside."""
    assert size % group_size == 0, f"groups of {group_size} do not make up {size}"
    group, place = divmod(index, group_size)
    inside = range(group * group_size, (group + 1) * group_size)
    across = range(place, size, group_size)
    own = segments(0, numel, group_size)[(place + 1) % group_size]
    return (
        *_scatter_reduce(inside, place, (0, numel)),
        *_ring(across, group, own),
        *_all_gather(inside, place, (0, numel)),
    )


def folded(size: int) -> tuple[int, int]:
    """(the largest power of two up to `size`, how many members are beyond it)."""
    core = 1 << (size.bit_length() - 1)
    return core, size - core


def _tree(size: int, index: int, numel: int) -> tuple[Round, ...]:
    """Reduce up a binomial tree to member 0, then broadcast down it (Thakur, Rabenseifner and Gropp 2005)."""
    up, down, distance = [], [], 1
    while distance < size:
        child = index + distance if index % (2 * distance) == 0 and index + distance < size else None
        parent = index - distance if index % (2 * distance) == distance else None
        from_child = None if child is None else _message(child, (0, numel))
        to_parent = None if parent is None else _message(parent, (0, numel))
        up.append(Round(SCATTER_REDUCE, to_parent, from_child))
        down.append(Round(ALL_GATHER, from_child, to_parent))
        distance *= 2
    return (*up, *reversed(down))


def _halving_doubling(size: int, index: int, numel: int) -> tuple[Round, ...]:
    """Vector halving, distance doubling, and back (Rabenseifner 2004; Thakur, Rabenseifner, Gropp 2005).

    The members beyond a power of two fold in first: each odd one among the first pairs gives all it has to the even one
    before it, waits, and gets the result. Every segment is summed by one rank and copied, so all have the same bits.
    """
    core, extra = folded(size)
    whole: Span = (0, numel)
    if index < 2 * extra and index % 2:
        idle = core.bit_length() - 1
        reducing, gathering = [(Round(phase, None, None),) * idle for phase in (SCATTER_REDUCE, ALL_GATHER)]
        message = _message(index - 1, whole)
        return (Round(SCATTER_REDUCE, message, None), *reducing, *gathering, Round(ALL_GATHER, None, message))
    place = index // 2 if index < 2 * extra else index - extra
    halving, doubling, span = [], [], whole
    distance = 1
    while distance < core:
        partner = place ^ distance
        peer = 2 * partner if partner < extra else partner + extra
        lower, upper = segments(*span, 2)
        keep, give_away = (upper, lower) if place & distance else (lower, upper)
        halving.append(Round(SCATTER_REDUCE, _message(peer, give_away), _message(peer, keep)))
        doubling.append(Round(ALL_GATHER, _message(peer, keep), _message(peer, give_away)))
        span = keep
        distance *= 2
    middle = (*halving, *reversed(doubling))
    if not extra:
        return middle
    other = index + 1 if index < 2 * extra else None
    fold_in = Round(SCATTER_REDUCE, None, None if other is None else _message(other, whole))
    fold_out = Round(ALL_GATHER, None if other is None else _message(other, whole), None)
    return (fold_in, *middle, fold_out)
