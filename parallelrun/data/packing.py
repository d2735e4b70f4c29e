"""Documents into samples of equal length, with little padding. numpy only.

Best-fit decreasing (Johnson et al. 1974) over the histogram of lengths, as Krell et al. 2021 ("Efficient sequence
packing without cross-contamination") do it: equal lengths are placed together, so a window of tens of thousands of
documents takes milliseconds. Documents are packed within windows of `WINDOW` consecutive ones; the result has 20 bytes
for a document.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from parallelrun.data.arrays import NDArray, np
from parallelrun.data.order import derive_key, mix
from parallelrun.planner.model.definitions import NUM_EXAMPLES, Packing

WINDOW = 2**16  # documents
_MOST_KEPT = 8  # results, which forked ranks find computed

Pattern = tuple[tuple[int, int], ...]  # (length, number of documents of it) of a sample


@dataclass(frozen=True)
class Packs:
    """Which pieces of documents are in each sample. starts: of each piece in the stream of tokens; lengths: of its
    inputs; ends: for each sample the number of pieces up to its end. cut: documents that gave several pieces."""

    starts: NDArray[np.int64]
    lengths: NDArray[np.int32]
    ends: NDArray[np.int64]
    cut: int

    def __len__(self) -> int:
        return int(self.ends.size)

    def pieces(self, sample: int) -> slice:
        return slice(int(self.ends[sample - 1]) if sample else 0, int(self.ends[sample]))

    def packing(self) -> Packing:
        """The averages over all samples, and some of them."""
        number, sizes = max(1, len(self)), self.lengths.astype(np.float64)
        samples = np.linspace(0, len(self) - 1, min(NUM_EXAMPLES, len(self))).astype(np.int64).tolist()
        examples = tuple(tuple(self.lengths[self.pieces(sample)].tolist()) for sample in samples)
        squares = float(sizes @ sizes) / number
        return Packing(sizes.size / number, float(sizes.sum()) / number, squares, self.cut, examples)


def pack(lengths: NDArray[np.int64], seq: int, shift: int, seed: int) -> Packs:
    """Pack documents of `lengths` tokens, which follow each other in a stream, into samples of `seq` inputs.

    shift: tokens of a document that are targets alone: 1 where each token predicts the next. A longer document is cut
    into pieces of `seq` inputs and a rest; one without an input is left out. seed: decides which of several documents
    of equal length goes where.
    """
    key = hashlib.sha256(lengths.tobytes()).hexdigest(), seq, shift, seed
    if key not in _kept:
        _kept[key] = _pack(lengths, seq, shift, seed)
        while len(_kept) > _MOST_KEPT:
            _kept.popitem(last=False)
    return _kept[key]


_kept: OrderedDict[tuple[str, int, int, int], Packs] = OrderedDict()


def _pack(lengths: NDArray[np.int64], seq: int, shift: int, seed: int) -> Packs:
    inputs = np.maximum(lengths - shift, 0)
    counts = -(-inputs // seq)
    firsts = np.cumsum(counts) - counts
    number = np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(firsts, counts)  # of a piece in its document
    starts = np.repeat(np.cumsum(lengths) - lengths, counts) + number * seq
    sizes = np.minimum(seq, np.repeat(inputs, counts) - number * seq).astype(np.int32)
    order, row_sizes = [], []
    for begin in range(0, sizes.size, WINDOW):
        pieces, each = _pack_window(sizes[begin : begin + WINDOW], seq, derive_key(seed, 0x7061636B, begin))
        order.append(begin + pieces)
        row_sizes.append(each)
    if not order:
        return Packs(starts, sizes, np.zeros(0, dtype=np.int64), 0)
    pieces = np.concatenate(order)
    return Packs(starts[pieces], sizes[pieces], np.cumsum(np.concatenate(row_sizes)), int((counts > 1).sum()))


def _pack_window(sizes: NDArray[np.int32], seq: int, key: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(pieces in the order of the samples, number of pieces of each sample)."""
    drawn = mix(np.arange(sizes.size, dtype=np.uint64) ^ np.uint64(key))
    by_length = np.lexsort((drawn, -sizes))
    lengths, counts = np.unique(sizes, return_counts=True)
    lengths, counts = lengths[::-1], counts[::-1]
    next_of = dict(zip(lengths.tolist(), (np.cumsum(counts) - counts).tolist()))
    order, row_sizes = [], []
    for rows, pattern in best_fit_decreasing(list(zip(lengths.tolist(), counts.tolist())), seq):
        columns = []
        for length, number in pattern:
            first = next_of[length]
            next_of[length] = first + rows * number
            columns.append(by_length[first : first + rows * number].reshape(rows, number))
        samples = np.concatenate(columns, axis=1)
        order.append(samples.reshape(-1))
        row_sizes.append(np.full(rows, samples.shape[1], dtype=np.int64))
    return np.concatenate(order), np.concatenate(row_sizes)


def best_fit_decreasing(histogram: list[tuple[int, int]], seq: int) -> Iterator[tuple[int, Pattern]]:
    """(number of samples, what is in each of them) for (length, number of documents), the longest first.

    Each document goes into the sample with the least room that still suffices, else into a new one.
    """
    open_samples: dict[int, list[tuple[int, Pattern]]] = {}  # by room
    rooms: list[int] = []  # rising

    def leave(number: int, pattern: Pattern, room: int) -> None:
        if room not in open_samples:
            open_samples[room] = []
            insort(rooms, room)
        open_samples[room].append((number, pattern))

    for length, left in histogram:
        while left:
            at = bisect_left(rooms, length)
            room = rooms[at] if at < len(rooms) else seq
            number, pattern = open_samples[room].pop() if at < len(rooms) else (left, ())
            if at < len(rooms) and not open_samples[room]:
                del open_samples[room], rooms[at]
            each = min(room // length, left)
            used = min(number, left // each)
            if number > used and pattern:
                leave(number - used, pattern, room)
            leave(used, (*pattern, (length, each)), room - length * each)
            left -= used * each
    for room in rooms:
        yield from open_samples[room]
