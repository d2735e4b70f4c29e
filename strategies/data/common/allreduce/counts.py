"""The number and size of the messages in the tables of `steps`, per rank and per link. Torch-free."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from parallelrun.plan.structure import Collective

from .algorithm import Algorithm
from .steps import HALVING_DOUBLING, NATIVE, RING, SCATTER_REDUCE, TREE, segments, table

BUFFERS_ON_CPU = 2  # on gloo the receives of a round are posted while those of the round before are added


@dataclass(frozen=True)
class Counts:
    """Of one rank in one all-reduce: messages it starts sending, elements in them, messages it receives."""

    sends: int
    elements: int
    receives: int

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.sends + other.sends, self.elements + other.elements, self.receives + other.receives)


def rows(
    algorithm: Algorithm, size: int, index: int, numel: int, element_bytes: int, limit: int | None, axis: str = "dp"
) -> list[Collective]:
    """The predicted rows of one all-reduce over `axis` of `numel` gradients for member `index` of `size`.

    limit: elements of a piece of a message; None: messages are sent whole.
    """
    payload = numel * element_bytes
    if algorithm.name == NATIVE:
        return [Collective(axis, "all_reduce", "gradients", 1, payload)]
    found = counts(algorithm, size, index, numel, limit)
    return [
        Collective(axis, "send", "gradients", found.sends, found.elements * element_bytes),
        Collective(axis, "recv", "gradients", found.receives, 0),
    ]


def counts(algorithm: Algorithm, size: int, index: int, numel: int, limit: int | None = None) -> Counts:
    """The messages of member `index` of `size` for a tensor of `numel` elements."""
    if algorithm.name == RING:
        return _of_ring(size, index, numel, limit)
    if algorithm.name in (HALVING_DOUBLING, TREE):
        return _of_table(algorithm, size, index, numel, limit)  # 2 log2(n) rounds: nothing is shorter than counting
    group, place = divmod(index, algorithm.group_size)
    start, stop = segments(0, numel, algorithm.group_size)[(place + 1) % algorithm.group_size]
    inside = _of_ring(algorithm.group_size, place, numel, limit)
    return inside + _of_ring(size // algorithm.group_size, group, stop - start, limit)


def buffer_elements(algorithm: Algorithm, size: int, index: int, numel: int, on_cpu: bool) -> int:
    """Elements of the buffers in which member `index` of `size` receives what it adds to a tensor of `numel` elements.

    Each is as long as the longest such message. The backend's own all-reduce needs none.
    """
    if algorithm.name == NATIVE:
        return 0
    if algorithm.name == RING:
        longest = _longest_added(size, index, numel)
    elif algorithm.name in (HALVING_DOUBLING, TREE):
        rounds = table(algorithm.name, size, index, numel, algorithm.group_size)
        added = [one.receive.numel for one in rounds if one.receive and one.phase == SCATTER_REDUCE]
        longest = max(added, default=0)
    else:
        group, place = divmod(index, algorithm.group_size)
        start, stop = segments(0, numel, algorithm.group_size)[(place + 1) % algorithm.group_size]
        inside = _longest_added(algorithm.group_size, place, numel)
        longest = max(inside, _longest_added(size // algorithm.group_size, group, stop - start))
    return longest * (BUFFERS_ON_CPU if on_cpu else 1)


def _longest_added(size: int, index: int, numel: int) -> int:
    """A member of a ring adds to every segment but the one with its own number, which it sends first."""
    base, num_longer = divmod(numel, size)
    if size == 1:
        return 0
    return base + (num_longer > (index < num_longer))


def _of_ring(size: int, index: int, numel: int, limit: int | None) -> Counts:
    """Two rounds of the ring of all segments, without the one that is received or sent last in each phase."""
    base, num_longer = divmod(numel, size)

    def length(segment: int) -> int:
        return base + (segment % size < num_longer)

    def num_messages(segment: int) -> int:
        return _num_pieces(length(segment), limit)

    twice = 2 * (num_longer * _num_pieces(base + 1, limit) + (size - num_longer) * _num_pieces(base, limit))
    return Counts(
        twice - num_messages(index + 1) - num_messages(index + 2),
        2 * numel - length(index + 1) - length(index + 2),
        twice - num_messages(index) - num_messages(index + 1),
    )


def _num_pieces(numel: int, limit: int | None) -> int:
    return -(-numel // (limit or max(1, numel)))


def _of_table(algorithm: Algorithm, size: int, index: int, numel: int, limit: int | None) -> Counts:
    rounds = table(algorithm.name, size, index, numel, algorithm.group_size)
    sent = [one.send.numel for one in rounds if one.send]
    received = [one.receive.numel for one in rounds if one.receive]
    return Counts(sum(_num_pieces(n, limit) for n in sent), sum(sent), sum(_num_pieces(n, limit) for n in received))


def links(algorithm: Algorithm, size: int, numel: int) -> dict[tuple[int, int], int]:
    """Elements sent from one member to another in one all-reduce: (from, to) -> how many, where there are any."""
    found: Counter[tuple[int, int]] = Counter()
    for index in range(size):
        for one in table(algorithm.name, size, index, numel, algorithm.group_size):
            if one.send:
                found[index, one.send.peer] += one.send.numel
    return dict(sorted(found.items()))
