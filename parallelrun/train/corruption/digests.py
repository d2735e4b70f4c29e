"""Checksums of the raw bits of tensors, as 64-bit integers that wrap around.

A row of 256 words has the sum of its words as its checksum, so that one flipped bit always changes it; two flips cancel
only in the same row, at the same bit of a word, in opposite directions. Sums of integers do not depend on their order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

ROW = 256  # words
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FACTOR = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio, odd: its multiples are spread over all 64 bits


def words_of(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """View a tensor's bits as integers: (rows, ROW), and what is left. Of 8 bytes each where its bytes divide by 8."""
    flat = tensor.detach().reshape(-1)
    size = flat.element_size()
    fits = (flat.numel() * size) % 8 == 0 and (flat.storage_offset() * size) % 8 == 0
    words = flat.view(torch.int64 if fits else _WORDS[size])
    in_rows = words.numel() // ROW * ROW
    return words[:in_rows].view(-1, ROW), words[in_rows:]


def row_sums(rows: Tensor, rest: Tensor) -> Tensor:
    """Return the checksums (int64) of the words of one tensor: of each row, and of the rest if there is one."""
    if not rest.numel():
        return rows.sum(1, dtype=torch.int64)
    ending = rest.sum(0, keepdim=True, dtype=torch.int64)
    return torch.cat([rows.sum(1, dtype=torch.int64), ending]) if rows.numel() else ending


def digest(tensor: Tensor) -> Tensor:
    """Return one checksum (0-d int64) of a tensor's bits, in which each row has a factor of its own."""
    return _combined(row_sums(*words_of(tensor)))


def digests(tensors: Iterable[Tensor]) -> Tensor:
    """Return the `digest` of each tensor: int64 (number of tensors,)."""
    found = [digest(tensor) for tensor in tensors]
    return torch.stack(found) if found else torch.zeros(0, dtype=torch.int64)


def _combined(sums: Tensor) -> Tensor:
    """Combine checksums of rows. Each has an odd factor, so that a difference in one row never disappears."""
    wrapped = _FACTOR - 2**64
    factors = torch.arange(1, 2 * sums.numel(), 2, device=sums.device) * wrapped
    mixed = sums ^ (sums >> 31)  # invertible: it carries the high bits down, where a factor does not lose them
    return (mixed * factors).sum()


class AtRest:
    """Notices which of some tensors change while nobody may write to them. Their storage must stay the same."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        self._names = list(tensors)
        self._words = [words_of(tensor) for tensor in tensors.values()]
        self._before: list[Tensor] = []

    @torch.no_grad()
    def begin(self) -> None:
        """Take the checksums: from now on the tensors rest."""
        self._before = [row_sums(*words) for words in self._words]

    @property
    def digest(self) -> int:
        """One checksum of all tensors as they were at `begin`."""
        return int(_combined(torch.cat(self._before))) if self._before else 0

    @torch.no_grad()
    def changed(self) -> list[str]:
        """Return the names of the tensors that have changed since `begin`; none before the first one."""
        if not self._before:
            return []
        now = torch.cat([row_sums(*words) for words in self._words])
        if torch.equal(torch.cat(self._before), now):
            return []
        parts = now.split([before.numel() for before in self._before])
        return [name for name, old, new in zip(self._names, self._before, parts) if not torch.equal(old, new)]
