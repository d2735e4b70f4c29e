"""Orders of tokens: which positions of a sequence each of several ranks holds. Pure functions.

Under a causal mask a query at position p attends to p + 1 keys, so ranks with late positions have more work.
`contiguous` gives a rank one piece; `zigzag` (Llama 3) cuts 2 x size chunks and gives rank i chunks i and
2 x size - 1 - i; `striped` (Brandon et al. 2023) gives position p to rank p mod size, and so each rank an equal part of
every document that is packed into a sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple


class Span(NamedTuple):
    """The positions start, start + step, ..., `length` of them. Spans of one plan have the same step."""

    start: int
    step: int
    length: int

    @property
    def stop(self) -> int:
        """One beyond the last position."""
        return self.start + (self.length - 1) * self.step + 1


Spans = tuple[Span, ...]


@dataclass(frozen=True)
class TokenOrder:
    """spans_of: (size, index, seq) -> the positions of a rank, ascending. parts: of a rank, into which a sequence is
    cut: size x parts divides it."""

    spans_of: Callable[[int, int, int], Spans]
    parts: int = 1

    def spans(self, size: int, index: int, seq: int) -> Spans:
        """The positions of rank `index` of `size`, in the order in which it holds them."""
        assert seq % (size * self.parts) == 0, f"{size} x {self.parts} parts do not divide {seq}"
        return self.spans_of(size, index, seq)


def _contiguous(size: int, index: int, seq: int) -> Spans:
    return (Span(index * (seq // size), 1, seq // size),)


def _zigzag(size: int, index: int, seq: int) -> Spans:
    chunk = seq // (2 * size)
    return Span(index * chunk, 1, chunk), Span((2 * size - 1 - index) * chunk, 1, chunk)


def _striped(size: int, index: int, seq: int) -> Spans:
    return (Span(index, size, seq // size),)


CONTIGUOUS = "contiguous"
ORDERS = {CONTIGUOUS: TokenOrder(_contiguous), "zigzag": TokenOrder(_zigzag, 2), "striped": TokenOrder(_striped)}


def part(spans: Spans, num: int, index: int) -> Spans:
    """Part `index` of `num` equal parts of the positions of `spans`."""
    size = sum(span.length for span in spans) // num
    first, spans_found = index * size, []
    for start, step, length in spans:
        left, right = max(first, 0), min(first + size, length)
        if left < right:
            spans_found.append(Span(start + left * step, step, right - left))
        first -= length
    return tuple(spans_found)


def inside(spans: Spans, start: int, stop: int) -> tuple[int, Spans]:
    """(positions of `spans` before `start`, those in [start, stop))."""
    before, sums = 0, []
    for span in spans:
        first, last = (min(max(0, -((span.start - end) // span.step)), span.length) for end in (start, stop))
        before += first
        if first < last:
            sums.append(Span(span.start + first * span.step, span.step, last - first))
    return before, tuple(sums)


def num_pairs(queries: Sequence[Span], keys: Sequence[Span]) -> int:
    """The pairs of a query and a key that is not after it: the work of causal attention."""
    return sum(_num_pairs(query, key) for query in queries for key in keys)


def _num_pairs(query: Span, key: Span) -> int:
    """Query i sees keys 0 to i - offset."""
    offset = -((query.start - key.start) // query.step)
    full = max(0, query.length - max(0, key.length + offset))  # queries that see every key
    first = max(0, offset)  # the first that sees one
    least, some = first - offset + 1, max(0, query.length - full - first)
    return full * key.length + some * least + some * (some - 1) // 2


class Imbalance(NamedTuple):
    """Imbalance of attention's work; 1.0 is even. ranks: the most of a rank over the mean. steps: the time of a ring in
    which every step waits for its slowest rank, over the mean work of a rank."""

    ranks: float
    steps: float


Work = Sequence[Sequence[int]]  # pairs of a query and a key, by rank and step: keys of the rank so many before it
Lengths = tuple[int, ...]  # of the documents of a sample, in order


def imbalance_of(calls: Iterable[Work]) -> Imbalance:
    """Return the imbalance of several calls of attention, in each of which every rank waits for the slowest."""
    most = in_steps = mean = 0.0
    for work in calls:
        most += max(map(sum, work))
        in_steps += sum(max(step) for step in zip(*work, strict=True))
        mean += sum(map(sum, work)) / len(work)
    return Imbalance(most / mean, in_steps / mean) if mean else Imbalance(1.0, 1.0)


@lru_cache(maxsize=64)
def packed_imbalance(
    order: str, size: int, seq: int, causal: bool, samples: tuple[Lengths, ...], micro_batch: int
) -> Imbalance:
    """Return the imbalance of documents that are packed into `samples`, of which a call computes `micro_batch`.

    Looks at the first microbatches alone where there are many documents or ranks.
    """
    most = max(1, MOST_COUNTED // (size**2 * max(1, sum(map(len, samples)) // len(samples)) * micro_batch))
    spans = [ORDERS[order].spans(size, index, seq) for index in range(size)]
    starts = range(0, min(len(samples), most * micro_batch), micro_batch)
    return imbalance_of(document_work(spans, samples[start : start + micro_batch], causal) for start in starts)


MOST_COUNTED = 2**14  # documents x pairs of ranks, of which 2**14 take 0.1 s


def document_work(spans: Sequence[Spans], samples: Sequence[Lengths], causal: bool) -> Work:
    """The work of attention inside the documents of some samples, on ranks with these spans."""
    size = len(spans)
    work = [[0] * size for _ in spans]
    for lengths in samples:
        start = 0
        for length in lengths:
            pairs = [inside(own, start, start + length)[1] for own in spans]
            start += length
            for rank, queries in enumerate(pairs):
                for step in range(size):
                    keys = pairs[(rank - step) % size]
                    work[rank][step] += num_pairs(queries, keys) if causal else _num(queries) * _num(keys)
    return work


def _num(spans: Spans) -> int:
    return sum(span.length for span in spans)


@lru_cache(maxsize=256)
def imbalance(order: str, size: int, seq: int) -> Imbalance:
    """Return the imbalance of one sequence over `size` ranks. All steps of a ring after its first send are alike."""
    spans = [ORDERS[order].spans(size, index, seq) for index in range(size)]
    whole, total = (Span(0, 1, seq),), seq * (seq + 1) // 2
    rank = max(num_pairs(own, whole) if own[0].step == 1 else _of_stripe(own[0]) for own in spans)
    steps = max(num_pairs(own, own) for own in spans)
    if size > 1:
        steps += (size - 1) * max(num_pairs(spans[index], spans[index - 1]) for index in range(size))
    return Imbalance(rank * size / total, steps * size / total)


def _of_stripe(span: Span) -> int:
    """The pairs of its queries with all keys of the sequence."""
    return span.length * (span.start + 1) + span.step * (span.length * (span.length - 1) // 2)
