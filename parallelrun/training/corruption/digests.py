"""Checksums of the raw bits of tensors, as 64-bit integers. They are compared within a run, on devices of one kind.

In host memory they are XXH3, which reads a tensor once, about as fast as memory gives it. On other devices torch sums
rows of 256 words: a row's checksum is made of the sums, modulo 2^64, of its words and of their upper halves. So a
flipped bit always changes it, and so does a bit that is stuck in several words of a row; two flips cancel only at the
same bit of words of one row, in opposite directions. Sums of integers do not depend on their order.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import ceil

import torch
import xxhash
from torch import Tensor

ROW = 256  # words
PACKED = 128 * ROW  # words: smaller tensors are copied into one, whose rows are summed by one operation
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FACTOR = 0x9E3779B97F4A7C15 - 2**64  # 2^64 over the golden ratio, odd: its multiples are spread over all 64 bits
_PIECE = 2**24  # words whose upper halves are taken at a time


class Bits:
    """The bits of some tensors on devices of one kind, which are read again and again. Their storage stays the same."""

    def __init__(self, tensors: Sequence[Tensor]):
        self._tensors = tensors
        self._reads = Hashes if not tensors or tensors[0].device.type == "cpu" else RowSums
        # The words of a tensor with gaps are a copy, which does not change with it.
        self._views = self._reads(tensors) if all(tensor.is_contiguous() for tensor in tensors) else None

    def read(self) -> Tensor:
        """Return a checksum of each tensor (int64, 1-d), on their device."""
        return (self._views or self._reads(self._tensors)).read()


def digests(tensors: Sequence[Tensor]) -> Tensor:
    """Return a checksum of each tensor (int64, 1-d), on their device."""
    return Bits(tensors).read()


def digest_of_all(tensors: Sequence[Tensor]) -> Tensor:
    """Return one checksum (0-d int64) of several tensors; 0 without tensors, on the CPU."""
    return combined(digests(tensors))


def combined(checksums: Tensor) -> Tensor:
    """Return one checksum (0-d int64) of several. Each has an odd factor: a difference in one never disappears."""
    return (_mixed(checksums) * _factors(checksums.numel(), checksums.device)).sum()


class Hashes:
    """XXH3 of tensors in host memory."""

    def __init__(self, tensors: Iterable[Tensor]):
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
    """Sums of the rows of tensors on one device, by torch."""

    def __init__(self, tensors: Iterable[Tensor]):
        words = [_words_of(tensor) for tensor in tensors]
        self._groups = _groups_of(words)
        self._counts = tuple(ceil((rows.numel() + rest.numel()) / ROW) for rows, rest in words)  # rows of each tensor

    @torch.no_grad()
    def read(self) -> Tensor:
        """Return a checksum of each tensor, in which each row has a factor of its own."""
        sums = torch.cat([_of_large(*group) if group[0].dim() == 2 else _of_small(group) for group in self._groups])
        owners, factors = _places(self._counts, sums.device)
        return sums.new_zeros(len(self._counts)).index_add_(0, owners, _mixed(sums) * factors)


def _words_of(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """View a tensor's bits as integers: (rows, ROW), and what is left. Of 8 bytes each where its bytes divide by 8."""
    flat = tensor.detach().reshape(-1)
    size = flat.element_size()
    fits = (flat.numel() * size) % 8 == 0 and (flat.storage_offset() * size) % 8 == 0
    words = flat.view(torch.int64 if fits else _WORDS[size])
    in_rows = words.numel() // ROW * ROW
    return words[:in_rows].view(-1, ROW), words[in_rows:]


def _groups_of(words: Sequence[tuple[Tensor, Tensor]]) -> list[list[Tensor]]:
    """Return parts of tensors whose rows are summed together: a large tensor's two, or those of the small tensors
    between two large ones, each filled up to whole rows."""
    groups: list[list[Tensor]] = [[]]
    for rows, rest in words:
        if rows.numel() >= PACKED:
            groups += [[rows, rest], []]
        else:
            filled = (rows.view(-1), rest, rest.new_zeros(-rest.numel() % ROW))
            groups[-1] += [part for part in filled if part.numel()]
    return [group for group in groups if group]


def _of_large(rows: Tensor, rest: Tensor) -> Tensor:
    """Return the checksums (int64) of the words of one tensor: of each row, and of the rest if there is one."""
    pieces = [*rows.split(_PIECE // ROW), *([rest.view(1, -1)] if rest.numel() else [])]
    return torch.cat([_of_rows(piece) for piece in pieces])


def _of_small(group: Sequence[Tensor]) -> Tensor:
    return _of_rows(torch.cat(tuple(group)).view(-1, ROW))


def _of_rows(rows: Tensor) -> Tensor:
    words = rows.long()  # smaller words are packed with others as such, too
    return words.sum(1).add_((words >> 32).sum(1), alpha=_FACTOR)


@lru_cache(maxsize=64)
def _places(counts: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return, for each row of tensors with so many rows, the number of its tensor and its factor."""
    numbers = torch.tensor(counts)
    owners = torch.arange(len(counts)).repeat_interleave(numbers)
    first = (numbers.cumsum(0) - numbers).repeat_interleave(numbers)
    return owners.to(device), (2 * (torch.arange(owners.numel()) - first) + 1).to(device) * _FACTOR


def _mixed(sums: Tensor) -> Tensor:
    """Invertible: it carries the high bits down, where a factor does not lose them."""
    return sums ^ (sums >> 31)


@lru_cache(maxsize=256)
def _factors(count: int, device: torch.device) -> Tensor:
    return (2 * torch.arange(count, device=device) + 1) * _FACTOR
