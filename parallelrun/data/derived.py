"""Samples made of others: masked (Devlin et al. 2019, appendix A.1), or with targets of half a window. numpy only."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from parallelrun.data.arrays import NDArray, np
from parallelrun.data.order import derive_key, mix
from parallelrun.planner.model.definitions import IGNORED, BatchShare, Dataset, Packing, Split
from parallelrun.planner.model.model_spec import ModelSpec

RATE = 0.15  # share of the tokens that the model must predict
MASKED, RANDOM = 0.8, 0.1  # shares of those that become [MASK] and another token; the rest stay as they are


@dataclass(frozen=True)
class DerivedSplit(Split):
    """Samples made of those of `inner`, one of each."""

    inner: Split

    @property
    def shares(self) -> tuple[BatchShare, ...]:  # type: ignore[override]
        return self.inner.shares

    @property
    def packs(self) -> bool:  # type: ignore[override]
        return self.inner.packs

    def __len__(self) -> int:
        return len(self.inner)

    def document_lengths(self, index: int) -> NDArray[np.int64]:
        return self.inner.document_lengths(index)

    def packing(self) -> Packing:
        return self.inner.packing()


@dataclass(frozen=True)
class HalvedSplit(DerivedSplit):
    """The windows of `inner` with the targets of the second half only: a sequence-to-sequence model reads the first
    half as its source, and predicts in the second half the token behind each."""

    def sample(self, index: int) -> tuple[NDArray[Any], NDArray[Any]]:
        tokens, targets = self.inner.sample(index)
        return tokens, targets[len(tokens) - len(tokens) // 2 :]


@dataclass(frozen=True)
class MaskedSplit(DerivedSplit):
    """The windows of `inner` with some tokens hidden: target = the hidden token, IGNORED elsewhere.

    Which tokens are hidden depends on (seed, sample, index in the window) alone and is the same in every epoch, as in
    BERT's own data files. Every sample has at least one hidden token; padding behind packed documents is never
    hidden. Random tokens are drawn among the `vocab` ids without that of [MASK].
    """

    seed: int
    mask_token: int
    vocab: int

    def sample(self, index: int) -> tuple[NDArray[Any], NDArray[Any]]:
        return self._masked(self.inner.sample(index)[0], index)

    def rest(self, part: int = 0) -> tuple[NDArray[Any], NDArray[Any]] | None:
        rest = self.inner.rest(part)
        return rest and self._masked(np.append(rest[0], rest[1][-1]), len(self) + part)

    def _masked(self, tokens: NDArray[Any], index: int) -> tuple[NDArray[Any], NDArray[Any]]:
        key = np.uint64(derive_key(self.seed, 0x6D61736B, index))
        chance, kind, other = (_uniform(key, number, tokens.size) for number in range(3))
        if self.packs:
            chance[int(self.document_lengths(index).sum()) :] = 1.0  # padding is no token
        is_hidden = chance < RATE
        is_hidden[np.argmin(chance)] = True
        others = (other * (self.vocab - 1)).astype(np.int64)
        others += others >= self.mask_token
        replaced = np.where(kind < MASKED, self.mask_token, others)
        replaced = np.where(kind < MASKED + RANDOM, replaced, tokens)
        return np.where(is_hidden, replaced, tokens), np.where(is_hidden, tokens, IGNORED)


def halve(dataset: Dataset) -> Dataset:
    """`dataset` as samples for a model that maps a source to a target."""
    return _derived(dataset, "halves/1", HalvedSplit)


def mask(dataset: Dataset, spec: ModelSpec, seed: int) -> Dataset:
    """`dataset` as masked-language-model samples for a model that has a mask token."""
    assert spec.mask_token is not None
    which = f"{spec.mask_token}" if spec.mask_token == spec.vocab - 1 else f"{spec.mask_token} of {spec.vocab}"
    make = partial(MaskedSplit, seed=seed, mask_token=spec.mask_token, vocab=spec.vocab)
    return replace(_derived(dataset, f"masked/1/{seed}/{which}", make), has_ignored=True)


def _derived(dataset: Dataset, kind: str, make: Callable[[Split], Split]) -> Dataset:
    fingerprint = hashlib.sha256(f"{kind}/{dataset.fingerprint}".encode()).hexdigest()
    whole = None if dataset.whole is None else make(dataset.whole)
    return replace(dataset, train=make(dataset.train), val=make(dataset.val), whole=whole, fingerprint=fingerprint)


def _uniform(key: np.uint64, number: int, size: int) -> NDArray[np.float64]:
    """`size` numbers in [0, 1), drawn by hash of the key and `number`."""
    bits = mix(mix(np.arange(size, dtype=np.uint64) + np.uint64(number << 32)) ^ key)
    return (bits >> np.uint64(11)).astype(np.float64) / 2**53
