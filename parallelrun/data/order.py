"""The order of samples: a function of (seed, step, index in the global batch) only, never of the plan.

Each epoch is a keyed permutation of the dataset, computed element by element: a Feistel network over the smallest power
of two that holds the dataset, applied again until the result is inside (cycle walking: Black and Rogaway, "Ciphers with
arbitrary finite domains", 2002, section 3). So no permutation is stored, access is O(1), and the order does not depend
on numpy's version.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from parallelrun.data.arrays import NDArray, np
from parallelrun.data.shares import counts_after
from parallelrun.planner.model.definitions import BatchShare

_ROUNDS = 8
_PLACES, _PART = 0x6D6978, 0x70617274  # keys of the places in a batch, and of the order of a part
_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A 64-bit finaliser (splitmix64): equal inputs give equal outputs, close inputs give unrelated ones."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def derive_key(*parts: int) -> int:
    """One 64-bit key from several integers; the order of the parts matters."""
    key = 0
    for part in parts:
        key = (key + _GOLDEN * ((part & _MASK64) + 1)) & _MASK64
        key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & _MASK64
        key ^= key >> 31
    return key


@lru_cache(maxsize=16)
def _round_keys(key: int) -> tuple[np.uint64, ...]:
    return tuple(np.uint64(derive_key(key, number)) for number in range(_ROUNDS))


def permute(values: NDArray[np.int64], length: int, key: int) -> NDArray[np.int64]:
    """The images of `values` (each in [0, length)) under the permutation of range(length) that `key` chooses."""
    bits = max(1, (length - 1).bit_length())
    low_bits = bits // 2
    low_mask, high_mask = np.uint64((1 << low_bits) - 1), np.uint64((1 << (bits - low_bits)) - 1)
    round_keys = _round_keys(key)

    def scramble(block: NDArray[np.uint64]) -> NDArray[np.uint64]:
        low, high = block & low_mask, block >> np.uint64(low_bits)
        for number, round_key in enumerate(round_keys):
            if number % 2:
                low = low ^ (mix(high + round_key) & low_mask)
            else:
                high = high ^ (mix(low + round_key) & high_mask)
        return (high << np.uint64(low_bits)) | low

    out = scramble(values.astype(np.uint64))
    outside = np.flatnonzero(out >= np.uint64(length))
    while outside.size:
        out[outside] = scramble(out[outside])
        outside = outside[out[outside] >= np.uint64(length)]
    return out.astype(np.int64)


@dataclass(frozen=True)
class Sampler:
    """The samples of each step's global batch. Each epoch uses every sample of the dataset exactly once, and an
    incomplete last batch joins the next epoch. Raises ValueError for an empty dataset or batch."""

    num_samples: int
    global_batch: int
    seed: int
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.num_samples < 1 or self.global_batch < 1:
            sizes = f"{self.global_batch} of {self.num_samples} samples"
            raise ValueError(f"cannot sample {sizes}; both must be at least 1")

    def indices(self, step: int, start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(dataset indices, sample ids) of samples [start, stop) of the global batch of `step`, counted from 1.

        The sample id n = (step - 1) * global_batch + i never repeats in a run; epoch = n // num_samples. Raises
        ValueError outside the batch.
        """
        if step < 1 or not 0 <= start <= stop <= self.global_batch:
            raise ValueError(
                f"step {step}, samples [{start}, {stop}) are outside a global batch of {self.global_batch}"
            )
        first = (step - 1) * self.global_batch
        ids = np.arange(first + start, first + stop, dtype=np.int64)
        return self._chosen(ids, step), ids

    def counts(self, step: int) -> tuple[int, ...]:
        """The samples of each part of a mixture in the first `step` global batches."""
        return ()

    def _chosen(self, ids: NDArray[np.int64], step: int) -> NDArray[np.int64]:
        return _in_epochs(ids, self.num_samples, self.seed, self.shuffle)


@dataclass(frozen=True)
class MixedSampler(Sampler):
    """The samples of a mixture: each global batch has the exact share of each part (`shares.counts_after`).

    Each part is in an order of its own, shuffled again in each of its epochs. With shuffle, the places in a batch are
    drawn, so that every rank and microbatch has samples of every part.
    """

    parts: tuple[BatchShare, ...] = ()

    def counts(self, step: int) -> tuple[int, ...]:
        return counts_after(tuple(part.weight for part in self.parts), self.global_batch, step)

    def _chosen(self, ids: NDArray[np.int64], step: int) -> NDArray[np.int64]:
        before, after = (np.array(self.counts(number), dtype=np.int64) for number in (step - 1, step))
        places = ids - (step - 1) * self.global_batch
        if self.shuffle:
            places = permute(places, self.global_batch, derive_key(self.seed, _PLACES, step))
        ends = np.cumsum(after - before)
        part_of = ends.searchsorted(places, side="right")
        out, offset = np.empty_like(places), 0
        for number, part in enumerate(self.parts):
            is_of_part = part_of == number
            ordinals = places[is_of_part] - ends[number] + after[number]  # among all samples of the part in the run
            key = derive_key(self.seed, _PART, number)
            out[is_of_part] = offset + _in_epochs(ordinals, part.num_samples, key, self.shuffle)
            offset += part.num_samples
        return out


def make_sampler(
    num_samples: int, global_batch: int, seed: int, shares: Sequence[BatchShare], shuffle: bool = True
) -> Sampler:
    """The sampler of a split: of a mixture if it has `shares`."""
    if shares:
        return MixedSampler(num_samples, global_batch, seed, shuffle, tuple(shares))
    return Sampler(num_samples, global_batch, seed, shuffle)


def _in_epochs(ordinals: NDArray[np.int64], num_samples: int, seed: int, shuffle: bool) -> NDArray[np.int64]:
    """Indices of samples by their number in a run that repeats `num_samples` of them, shuffled again in each epoch."""
    epochs, indices = np.divmod(ordinals, num_samples)
    if not shuffle:
        return indices
    out = np.empty_like(indices)
    for epoch in set(epochs.tolist()):  # the first call of numpy's `unique` imports numpy.ma, in every rank
        is_of_epoch = epochs == epoch
        out[is_of_epoch] = permute(indices[is_of_epoch], num_samples, derive_key(seed, epoch))
    return out
