"""The rounds of an all-reduce by messages between ranks, and those of the ring.

In every round a rank sends at most one message and receives at most one. It may send once it has received the messages
of all earlier rounds. `runtime.py` sends them; `rings.py` and `trees.py` have the algorithms and count their messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

SCATTER_REDUCE, ALL_GATHER = "scatter_reduce", "all_gather"  # what arrives is added; what arrives is the sum
Span = tuple[int, int]
Number = Any  # an int, or an array with one for each of several members


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


Rounds = tuple[Round, ...]


def segments(start: int, stop: int, parts: int) -> tuple[Span, ...]:
    """Cut [start, stop) into `parts` spans; the first are longer by one where it does not divide (Baidu's rule)."""
    base, longer = divmod(stop - start, parts)
    edges = [start + i * base + min(i, longer) for i in range(parts + 1)]
    return tuple(pairwise(edges))


class Halving(NamedTuple):
    """One halving of a vector with the partner at `distance`: a rank keeps one half and gives it the other."""

    distance: int
    keep: Span
    give: Span


def halvings(numel: int, size: int, index: int) -> tuple[Halving, ...]:
    """Vector halving, distance doubling: the halvings of member `index` of `size` (a power of two), in order."""
    span, distance, steps = (0, numel), 1, []
    while distance < size:
        lower, upper = segments(*span, 2)
        keep, give = (upper, lower) if index & distance else (lower, upper)
        steps.append(Halving(distance, keep, give))
        span, distance = keep, 2 * distance
    return tuple(steps)


def halved(numel: Number, times: int, index: Number) -> Number:
    """Elements that member `index` has after so many of its `halvings`; the lower half may be longer by one."""
    return (numel + 2**times - 1 - index % 2**times) // 2**times


def message(peer: int, span: Span) -> PeerMessage | None:
    """The message of a span; None if it is empty."""
    return PeerMessage(peer, *span) if span[0] < span[1] else None


def ring(members: Sequence[int], index: int, span: Span) -> Rounds:
    """Gibiansky, "Bringing HPC techniques to deep learning", 2017 (Baidu); Patarasuk and Yuan 2009."""
    return scatter_reduce(members, index, span) + all_gather(members, index, span)


def scatter_reduce(members: Sequence[int], index: int, span: Span) -> Rounds:
    """n - 1 rounds; member i ends with segment i + 1 summed."""
    return _around(SCATTER_REDUCE, members, index, span, first=index)


def all_gather(members: Sequence[int], index: int, span: Span) -> Rounds:
    """n - 1 rounds; member i begins with segment i + 1 and ends with all of the span."""
    return _around(ALL_GATHER, members, index, span, first=index + 1)


def _around(phase: str, members: Sequence[int], index: int, span: Span, first: int) -> Rounds:
    """Member `index` sends segment `first`, then in each round the segment that it has just received."""
    size, cut = len(members), segments(*span, len(members))
    after, before = members[(index + 1) % size], members[index - 1]
    return tuple(
        Round(phase, message(after, cut[number % size]), message(before, cut[(number - 1) % size]))
        for number in range(first, first - size + 1, -1)
    )
