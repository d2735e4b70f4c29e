"""Sequence-to-sequence samples from any dataset of tokens: the first half of each window is the source. numpy only."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any

from parallelrun.data.arrays import NDArray
from parallelrun.planner.model.definitions import BatchShare, Dataset, Split


@dataclass(frozen=True)
class HalvedSplit(Split):
    """The windows of `inner` with the targets of the second half only: the model reads the first half as its source,
    and predicts in the second half the token behind each."""

    inner: Split

    @property
    def shares(self) -> tuple[BatchShare, ...]:  # type: ignore[override]
        return self.inner.shares

    def __len__(self) -> int:
        return len(self.inner)

    def sample(self, index: int) -> tuple[NDArray[Any], NDArray[Any]]:
        tokens, targets = self.inner.sample(index)
        return tokens, targets[len(tokens) - len(tokens) // 2 :]


def halve(dataset: Dataset) -> Dataset:
    """`dataset` as samples for a model that maps a source to a target."""
    fingerprint = hashlib.sha256(f"halves/1/{dataset.fingerprint}".encode()).hexdigest()
    whole = None if dataset.whole is None else HalvedSplit(dataset.whole)
    halves = HalvedSplit(dataset.train), HalvedSplit(dataset.val)
    return replace(dataset, train=halves[0], val=halves[1], whole=whole, fingerprint=fingerprint)
