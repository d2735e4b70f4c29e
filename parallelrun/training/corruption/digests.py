"""Checksums of the raw bits of tensors, as 64-bit integers. They are compared within a run, on devices of one kind.

In host memory they are XXH3, which reads a tensor once, about as fast as memory gives it. On other devices torch sums
rows of 256 words: a row's checksum is made of the sums, modulo 2^64, of its words and of their upper halves. So a
flipped bit always changes it, and so does a bit that is stuck in several words of a row; two flips cancel only at the
same bit of words of one row, in opposite directions. Sums of integers do not depend on their order.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
import xxhash
from torch import Tensor

ROW = 256  # words
PIECE = 2**24  # words that one operation sums: parts of a large tensor, or several small ones
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FACTOR = 0x9E3779B97F4A7C15 - 2**64  # 2^64 over the golden ratio, odd: its multiples are spread over all 64 bits


def digests(tensors: Sequence[Tensor]) -> Tensor:
    """Return a checksum of each tensor (int64, 1-d), on their device."""
    return _reader(tensors).read()


class AtRest:
    """Notices which of some tensors change between updates. Their storage must stay the same."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        self._names, self._tensors = list(tensors), list(tensors.values())
        # The words of a tensor with gaps are a copy, which does not change with it.
        are_views = all(tensor.is_contiguous() for tensor in self._tensors)
        self._reader = _reader(self._tensors) if are_views else None
        self._sums: Tensor | None = None

    def begin(self) -> None:
        """Take the checksums: from now on the tensors must not change."""
        self._sums = self._read()

    def changed(self) -> list[str]:
        """Return the names of the tensors that have changed since `begin`; none before the first one."""
        if self._sums is None or torch.equal(self._sums, sums := self._read()):
            return []
        return [name for name, differs in zip(self._names, (self._sums != sums).tolist()) if differs]

    def _read(self) -> Tensor:
        return (self._reader or _reader(self._tensors)).read()


class Hashes:
    """XXH3 of tensors in host memory. `read` may be called again after the tensors have changed in place."""

    def __init__(self, tensors: Sequence[Tensor]):
        self._tensors = [tensor.detach().contiguous() for tensor in tensors]
        self._memory = [_bytes(tensor.nbytes).from_address(tensor.data_ptr()) for tensor in self._tensors]

    def read(self) -> Tensor:
        if not self._memory:
            return torch.zeros(0, dtype=torch.int64)
        return torch.frombuffer(array("Q", map(xxhash.xxh3_64_intdigest, self._memory)), dtype=torch.int64)


@lru_cache(maxsize=1024)
def _bytes(size: int) -> type[ctypes.Array[ctypes.c_char]]:
    """Return the type of `size` bytes of memory: to look at them so takes a sixth of the time of numpy's view."""
    return ctypes.c_char * size


class RowSums:
    """Sums of the rows of tensors on one device, by torch, read like `Hashes`."""

    def __init__(self, tensors: Sequence[Tensor]):
        self._groups: list[list[Tensor]] = [[]]
        rows, size = [], 0  # rows of each tensor; words of the last group
        for tensor in tensors:
            words = _words_of(tensor)
            rows.append(-(-words.numel() // ROW))
            for piece in words.split(PIECE):
                if size + piece.numel() > PIECE:
                    self._groups, size = [*self._groups, []], 0
                self._groups[-1] += [piece, piece.new_zeros(-piece.numel() % ROW)]
                size += piece.numel()
        counts = torch.tensor(rows)
        first = (counts.cumsum(0) - counts).repeat_interleave(counts)
        owners, device = torch.arange(len(rows)).repeat_interleave(counts), tensors[0].device
        self._num_tensors, self._owners = len(rows), owners.to(device)
        self._factors = (2 * (torch.arange(owners.numel()) - first) + 1).to(device) * _FACTOR  # by row of a tensor

    @torch.no_grad()
    def read(self) -> Tensor:
        sums = torch.cat([_sums_of_rows(torch.cat(group).view(-1, ROW)) for group in self._groups])
        return sums.new_zeros(self._num_tensors).index_add_(0, self._owners, _mixed(sums) * self._factors)


def _reader(tensors: Sequence[Tensor]) -> Hashes | RowSums:
    return Hashes(tensors) if not tensors or tensors[0].device.type == "cpu" else RowSums(tensors)


def _words_of(tensor: Tensor) -> Tensor:
    """View a tensor's bits as integers (1-d), of 8 bytes each where its bytes divide by 8."""
    flat = tensor.detach().reshape(-1)
    size = flat.element_size()
    fits = (flat.numel() * size) % 8 == 0 and (flat.storage_offset() * size) % 8 == 0
    return flat.view(torch.int64 if fits else _WORDS[size])


def _sums_of_rows(rows: Tensor) -> Tensor:
    words = rows.long()  # smaller words are joined with others as such, too
    return words.sum(1).add_((words >> 32).sum(1), alpha=_FACTOR)


def _mixed(sums: Tensor) -> Tensor:
    """Invertible: it carries the high bits down, where a factor does not lose them."""
    return sums ^ (sums >> 31)
