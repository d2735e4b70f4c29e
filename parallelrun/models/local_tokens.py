"""Which tokens of each sample a rank holds: all of them, unless context parallelism splits the sequence."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class LocalTokens:
    """All tokens of a sample, in order."""

    def indices(self, count: int, device: torch.device, start: int = 0) -> Tensor:
        """The global indices of `count` of the tokens held here from the one at `start` on: int64 (count,)."""
        return torch.arange(start, start + count, device=device)

    def rows(self, table: Tensor, count: int, start: int = 0) -> Tensor:
        """The rows of a table (seq, ...) at these indices."""
        return table[start : start + count]


class SomeTokens(LocalTokens):
    """The tokens at some global positions of every sample, ascending."""

    def __init__(self, positions: Sequence[int]):
        self._positions = torch.tensor(positions)

    def indices(self, count: int, device: torch.device, start: int = 0) -> Tensor:
        if self._positions.device != device:
            self._positions = self._positions.to(device)
        return self._positions[start : start + count]

    def rows(self, table: Tensor, count: int, start: int = 0) -> Tensor:
        return nn.functional.embedding(self.indices(count, table.device, start), table)


ALL = LocalTokens()


def hold(network: nn.Module, local: LocalTokens) -> None:
    """Let every layer that depends on the positions of its tokens know which they are."""
    for module in network.modules():
        if isinstance(getattr(module, "local_tokens", None), LocalTokens):
            module.__dict__["local_tokens"] = local
