"""Which tokens of two ranks attend to each other, as rectangles and triangles: nothing of size seq x seq.

A rank's tokens are spans of global positions. Causal attention of its queries to a rank's keys needs no mask: a pair of
spans sees all, nothing, or a triangle.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from parallelrun.planner.contract.context_order import Span, Spans, inside


class Tile(NamedTuple):
    """Queries and keys by index among the tokens of their ranks: query i sees every key, or keys 0..i if `causal`.

    samples: those in which they do; all, unless documents are packed."""

    query: slice
    key: slice
    causal: bool
    samples: slice = slice(None)

    @property
    def work(self) -> int:
        """The number of pairs of a query and a key."""
        queries: int = self.query.stop - self.query.start
        keys: int = self.key.stop - self.key.start
        return queries * (queries + 1) // 2 if self.causal else queries * keys


def tiles(queries: Sequence[Span], keys: Sequence[Span], causal: bool) -> tuple[Tile, ...]:
    """The tiles of one rank's queries and one rank's keys, both in ascending spans. None: nothing is seen.

    Spans of step 1 are equal or apart, and all as long (contiguous, zigzag); others are one per rank (striped).
    """
    num_queries, num_keys = (sum(span.length for span in spans) for spans in (queries, keys))
    if not causal:
        return (Tile(slice(0, num_queries), slice(0, num_keys), False),)
    if tuple(queries) == tuple(keys):  # tokens are in the order of positions
        return (Tile(slice(0, num_queries), slice(0, num_keys), True),)
    if queries[0].step > 1:
        (query,), (key,) = queries, keys
        return _striped(query, key)
    return _chunks(queries, keys)


@lru_cache(maxsize=2**14)
def document_tiles(
    queries: Spans, keys: Spans, causal: bool, lengths: tuple[int, ...], sample: int
) -> tuple[Tile, ...]:
    """The tiles of a sample into which documents of these lengths are packed: those inside each of them."""
    cut: list[Tile] = []
    start = 0
    for length in lengths:
        (first_query, mine), (first_key, theirs) = (
            inside(positions, start, start + length) for positions in (queries, keys)
        )
        start += length
        for query, key, is_causal, _ in tiles(mine, theirs, causal) if mine and theirs else ():
            cut.append(Tile(_moved(query, first_query), _moved(key, first_key), is_causal, slice(sample, sample + 1)))
    return tuple(cut)


def _moved(part: slice, by: int) -> slice:
    return slice(part.start + by, part.stop + by)


def _striped(query: Span, key: Span) -> tuple[Tile, ...]:
    """Query i of a stripe sees key j of another where i >= j, or i > j if the keys' stripe begins later. There are
    enough keys: of a document, a stripe that begins earlier has as many tokens or one more."""
    later = int(key.start > query.start)
    if query.length == later:
        return ()
    return (Tile(slice(later, query.length), slice(0, query.length - later), True),)


def _chunks(queries: Sequence[Span], keys: Sequence[Span]) -> tuple[Tile, ...]:
    """Each chunk of queries sees the chunks of keys before it: a prefix. Neighbours with the same prefix are one."""
    chunks: list[Tile] = []
    start = 0
    for query in queries:
        rows, start = slice(start, start + query.length), start + query.length
        assert query not in keys, f"{query} on both ranks, which differ otherwise"
        seen = sum(key.length for key in keys if key.stop <= query.start)
        if not seen:
            continue
        last = chunks[-1] if chunks else None
        if last is not None and last.key.stop == seen and last.query.stop == rows.start:
            chunks[-1] = Tile(slice(last.query.start, rows.stop), last.key, False)
        else:
            chunks.append(Tile(rows, slice(0, seen), False))
    return tuple(chunks)
