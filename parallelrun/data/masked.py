"""Masked-language-model samples from any dataset of tokens (Devlin et al. 2019, appendix A.1). numpy only."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any

from parallelrun.data.arrays import NDArray, np
from parallelrun.data.order import derive_key, mix
from parallelrun.definitions import Dataset, Split
from parallelrun.model_spec import ModelSpec

RATE = 0.15  # share of the tokens that the model must predict
MASKED, RANDOM = 0.8, 0.1  # shares of those that become [MASK] and another token; the rest stay as they are
IGNORED = -1


@dataclass(frozen=True)
class MaskedSplit(Split):
    """The windows of `inner` with some tokens hidden: target = the hidden token, IGNORED elsewhere.

    Which tokens are hidden depends on (seed, sample, index in the window) alone and is the same in every epoch, as in
    BERT's own data files. Every sample has at least one hidden token.
    """

    inner: Split
    seed: int
    mask_token: int

    def __len__(self) -> int:
        return len(self.inner)

    def sample(self, index: int) -> tuple[NDArray[Any], NDArray[Any]]:
        tokens, _ = self.inner.sample(index)
        key = np.uint64(derive_key(self.seed, 0x6D61736B, index))
        chance, kind, other = (_uniform(key, number, tokens.size) for number in range(3))
        chosen = chance < RATE
        chosen[np.argmin(chance)] = True
        replaced = np.where(kind < MASKED, self.mask_token, (other * self.mask_token).astype(np.int64))
        replaced = np.where(kind < MASKED + RANDOM, replaced, tokens)
        return np.where(chosen, replaced, tokens), np.where(chosen, tokens, IGNORED)


def mask(dataset: Dataset, spec: ModelSpec, seed: int) -> Dataset:
    """`dataset` as masked-language-model samples for a model that has a mask token."""
    assert spec.mask_token is not None
    fingerprint = hashlib.sha256(f"masked/1/{seed}/{spec.mask_token}/{dataset.fingerprint}".encode()).hexdigest()
    train, val = (MaskedSplit(split, seed, spec.mask_token) for split in (dataset.train, dataset.val))
    return replace(dataset, train=train, val=val, fingerprint=fingerprint, has_ignored=True)


def _uniform(key: np.uint64, number: int, size: int) -> NDArray[np.float64]:
    """`size` numbers in [0, 1), drawn by hash of the key and `number`."""
    bits = mix(mix(np.arange(size, dtype=np.uint64) + np.uint64(number << 32)) ^ key)
    return (bits >> np.uint64(11)).astype(np.float64) / 2**53
