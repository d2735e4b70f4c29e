"""Notices which tensors change while nobody may write to them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from parallelrun.training.corruption.digests import Bits


class AtRest:
    """Notices which of some tensors change between updates. Their storage must stay the same."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        self._names, self._bits = list(tensors), Bits(list(tensors.values()))
        self._sums: Tensor | None = None

    def begin(self) -> None:
        """Take the checksums: from now on the tensors must not change."""
        self._sums = self._bits.read()

    def changed(self) -> list[str]:
        """Return the names of the tensors that have changed since `begin`; none before the first one."""
        if self._sums is None or torch.equal(self._sums, sums := self._bits.read()):
            return []
        return [name for name, differs in zip(self._names, (self._sums != sums).tolist()) if differs]
