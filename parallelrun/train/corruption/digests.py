"""Checksums of the raw bits of tensors, as 64-bit integers that wrap around.

The checksum of a row of 256 words is made of two sums: of its words, and of their upper halves, which the first one
counts modulo 2^64 only. So a flipped bit always changes it, and so does a bit that is stuck in several words of a row;
two flips cancel only at the same bit of words of one row, in opposite directions. Sums of integers do not depend on
their order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import ceil

import torch
from torch import Tensor

ROW = 256  # words
PACKED = 128 * ROW  # words: smaller tensors are copied into one, whose rows are summed by one operation
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FACTOR = 0x9E3779B97F4A7C15 - 2**64  # 2^64 over the golden ratio, odd: its multiples are spread over all 64 bits
_PIECES = {"cpu": 2**17}  # words whose upper halves are taken at a time: 1 MiB stays in the processor's cache
_PIECE = 2**24  # on other devices


def words_of(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """View a tensor's bits as integers: (rows, ROW), and what is left. Of 8 bytes each where its bytes divide by 8."""
    flat = tensor.detach().reshape(-1)
    size = flat.element_size()
    fits = (flat.numel() * size) % 8 == 0 and (flat.storage_offset() * size) % 8 == 0
    words = flat.view(torch.int64 if fits else _WORDS[size])
    in_rows = words.numel() // ROW * ROW
    return words[:in_rows].view(-1, ROW), words[in_rows:]


def row_sums(rows: Tensor, rest: Tensor, scratch: Tensor | None = None) -> Tensor:
    """Return the checksums (int64) of the words of one tensor: of each row, and of the rest if there is one."""
    if not rest.numel():
        return _summed(rows, scratch)
    ending = _summed(rest.view(1, -1), scratch)
    return torch.cat([_summed(rows, scratch), ending]) if rows.numel() else ending


def scratch_for(tensors: Iterable[Tensor]) -> Tensor | None:
    """Return memory for `sums_of`, which it need not allocate then; None off the CPU, where torch keeps memory."""
    if any(tensor.device.type != "cpu" for tensor in tensors):
        return None
    return torch.empty(_PIECES["cpu"], dtype=torch.int64)


def _summed(rows: Tensor, scratch: Tensor | None) -> Tensor:
    """Return the checksum (int64) of each row of words."""
    size = max(_PIECES.get(rows.device.type, _PIECE) // max(rows.shape[1], 1), 1)
    if rows.shape[0] <= size:
        return _summed_piece(rows, scratch)
    return torch.cat([_summed_piece(piece, scratch) for piece in rows.split(size)])


def _summed_piece(rows: Tensor, scratch: Tensor | None) -> Tensor:
    words = rows.long()  # smaller words are packed with others as such, too
    into = None if scratch is None else scratch[: words.numel()].view(words.shape)
    return words.sum(1).add_(torch.bitwise_right_shift(words, 32, out=into).sum(1), alpha=_FACTOR)


def digest(tensor: Tensor) -> Tensor:
    """Return one checksum (0-d int64) of a tensor's bits, in which each row has a factor of its own."""
    return combined(row_sums(*words_of(tensor)))


def digest_of_all(tensors: Sequence[Tensor]) -> Tensor:
    """Return one checksum (0-d int64) of several tensors, faster than that of each: 0 without tensors."""
    by_size: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        by_size.setdefault(flat.element_size(), []).append(flat.view(_WORDS[flat.element_size()]))
    found = [digest(part) for words in by_size.values() for part in _joined(words)]
    return combined(torch.stack(found)) if len(found) > 1 else found[0] if found else torch.zeros((), dtype=torch.int64)


def _joined(words: Sequence[Tensor]) -> list[Tensor]:
    """Return large tensors as they are, and the small ones as one."""
    large = [each for each in words if each.numel() >= PACKED]
    small = [each for each in words if each.numel() < PACKED]
    return [*large, small[0] if len(small) == 1 else torch.cat(small)] if small else large


def digests(tensors: Iterable[Tensor]) -> Tensor:
    """Return the `digest` of each tensor: int64 (number of tensors,)."""
    words = [words_of(tensor) for tensor in tensors]
    if not words:
        return torch.zeros(0, dtype=torch.int64)
    sums = sums_of(groups_of(words))
    owners, factors = _places(counts_of(words), sums.device)
    return torch.zeros(len(words), dtype=torch.int64, device=sums.device).index_add_(0, owners, _mixed(sums) * factors)


def groups_of(words: Sequence[tuple[Tensor, Tensor]]) -> list[list[Tensor]]:
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


def sums_of(groups: Sequence[Sequence[Tensor]], scratch: Tensor | None = None) -> Tensor:
    """Return the checksums of the rows of all tensors, one tensor after another. scratch: see `scratch_for`."""
    found = [
        row_sums(group[0], group[1], scratch) if group[0].dim() == 2 else _packed_sums(group, scratch)
        for group in groups
    ]
    return torch.cat(found) if len(found) > 1 else found[0] if found else torch.zeros(0, dtype=torch.int64)


def _packed_sums(group: Sequence[Tensor], scratch: Tensor | None) -> Tensor:
    return _summed(torch.cat(tuple(group)).view(-1, ROW), scratch)


def counts_of(words: Sequence[tuple[Tensor, Tensor]]) -> tuple[int, ...]:
    """Return how many rows each tensor has."""
    return tuple(ceil((rows.numel() + rest.numel()) / ROW) for rows, rest in words)


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


def combined(sums: Tensor) -> Tensor:
    """Combine checksums of rows. Each has an odd factor, so that a difference in one row never disappears."""
    return (_mixed(sums) * _factors(sums.numel(), sums.device)).sum()


@lru_cache(maxsize=256)
def _factors(count: int, device: torch.device) -> Tensor:
    return (2 * torch.arange(count, device=device) + 1) * _FACTOR
