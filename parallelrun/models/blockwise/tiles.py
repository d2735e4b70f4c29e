"""Which tokens of two ranks attend to each other, as rectangles and triangles: nothing of size seq x seq.

A rank's tokens are spans of global positions. Causal attention of its queries to a rank's keys needs no mask: a pair of
spans sees all, nothing, or a triangle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from parallelrun.planner.contract.context_order import Span, Spans, inside

KEYS, GRADIENTS, EXCHANGED = "keys and values", "their gradients", "heads"  # purposes of what travels


class Tile(NamedTuple):
    """Queries and keys by index among the tokens of their ranks: query i sees every key, or keys 0..i if `causal`.

    samples: those in which they do; all, unless documents are packed. oldest: query i does not see keys j <= i +
    oldest, which are behind its window; every query sees some key. None: it sees them all. softcap: c, scores are
    c tanh(score / c) (Gemma 2, 2024), or None."""

    query: slice
    key: slice
    causal: bool
    samples: slice = slice(None)
    oldest: int | None = None
    softcap: float | None = None

    @property
    def work(self) -> int:
        """The number of pairs of a query and a key."""
        queries: int = self.query.stop - self.query.start
        keys: int = self.key.stop - self.key.start
        behind = 0 if self.oldest is None else queries + self.oldest
        seen = queries * (queries + 1) // 2 if self.causal else queries * keys
        return seen - behind * (behind + 1) // 2


def tiles(queries: Sequence[Span], keys: Sequence[Span], causal: bool, window: int | None = None) -> tuple[Tile, ...]:
    """The tiles of one rank's queries and one rank's keys, both in ascending spans. None: nothing is seen.

    window: the keys that a causal query sees, its own and those before it; None: all.

    Spans of step 1 are equal or apart, and all as long (contiguous, zigzag); others are one per rank (striped).
    """
    num_queries, num_keys = (sum(span.length for span in spans) for spans in (queries, keys))
    if not causal:
        return (Tile(slice(0, num_queries), slice(0, num_keys), False),)
    if window is not None:
        return tuple(_windowed(queries, keys, window))
    if tuple(queries) == tuple(keys):  # tokens are in the order of positions
        return (Tile(slice(0, num_queries), slice(0, num_keys), True),)
    if queries[0].step > 1:
        (query,), (key,) = queries, keys
        return _striped(query, key)
    return _chunks(queries, keys)


@lru_cache(maxsize=2**14)
def document_tiles(
    queries: Spans, keys: Spans, causal: bool, lengths: tuple[int, ...], sample: int, window: int | None = None
) -> tuple[Tile, ...]:
    """The tiles of a sample into which documents of these lengths are packed: those inside each of them."""
    cut: list[Tile] = []
    start = 0
    for length in lengths:
        (first_query, mine), (first_key, theirs) = (
            inside(positions, start, start + length) for positions in (queries, keys)
        )
        start += length
        for tile in tiles(mine, theirs, causal, window) if mine and theirs else ():
            rows, columns = _moved(tile.query, first_query), _moved(tile.key, first_key)
            cut.append(tile._replace(query=rows, key=columns, samples=slice(sample, sample + 1)))
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


def _windowed(queries: Sequence[Span], keys: Sequence[Span], window: int) -> Iterator[Tile]:
    """The tiles of every pair of spans, without what is behind the window."""
    first_query = 0
    for query in queries:
        first_key = 0
        for key in keys:
            for tile in _pair(query, key):
                if cut := _cut_behind(tile, query, key, window):
                    yield cut._replace(query=_moved(cut.query, first_query), key=_moved(cut.key, first_key))
            first_key += key.length
        first_query += query.length


def _pair(query: Span, key: Span) -> tuple[Tile, ...]:
    """What the queries of a span see of another, or of itself, without a window."""
    if query == key:
        return (Tile(slice(0, query.length), slice(0, key.length), True),)
    if query.step > 1:
        return _striped(query, key)
    return (Tile(slice(0, query.length), slice(0, key.length), False),) if key.stop <= query.start else ()


def _cut_behind(tile: Tile, query: Span, key: Span, window: int) -> Tile | None:
    """A tile without the keys behind the window, and without the queries that see none of the others."""
    distance = (query.start + query.step * tile.query.start) - (key.start + key.step * tile.key.start)
    oldest = (distance - window) // query.step
    num_queries, num_keys = tile.query.stop - tile.query.start, tile.key.stop - tile.key.start
    if oldest + num_queries - 1 < 0:
        return tile
    if tile.causal and oldest >= 0:
        return None
    if not tile.causal:
        num_queries = min(num_queries, num_keys - 1 - oldest)
        if num_queries <= 0:
            return None
    unseen = max(0, oldest + 1)
    rows = slice(tile.query.start, tile.query.start + num_queries)
    columns = slice(tile.key.start + unseen, tile.key.stop)
    if oldest - unseen + num_queries - 1 < 0:
        return Tile(rows, columns, tile.causal)
    return Tile(rows, columns, tile.causal, oldest=oldest - unseen)
