"""The tensors of a collective as shared memory takes them: contiguous, and unseen by autograd."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from parallelrun.distributed.shared_memory.arena import aligned


class Outputs:
    """Tensors that an operation fills. Those that are not contiguous get a stand-in, copied back at the end."""

    def __init__(self, tensors: Sequence[Tensor]):
        self.tensors = list(tensors)
        self.copies: list[tuple[Tensor, Tensor]] = []

    def contiguous(self, filled: bool) -> list[Tensor]:
        """Return contiguous tensors in their place; filled: with their values."""
        tensors = []
        for tensor in self.tensors:
            values = tensor.data  # no version counter: as with gloo, autograd does not see that it is overwritten
            if not values.is_contiguous():
                stand_in = values.contiguous() if filled else torch.empty(values.shape, dtype=values.dtype)
                self.copies.append((values, stand_in))
                values = stand_in
            tensors.append(values)
        return tensors


def plain(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor of the values, without autograd."""
    return tensor.data.contiguous()


def as_list(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def num_bytes_of(tensor: Tensor) -> int:
    """Return the size of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


def split(flat: Tensor, num_parts: int) -> list[Tensor]:
    """Return equal parts, except that the last ones may be shorter; each begins in a cache line of its own."""
    item = flat.element_size()
    each = aligned(-(-flat.numel() // num_parts) * item) // item
    starts = [min(number * each, flat.numel()) for number in range(num_parts + 1)]
    return [flat[first:last] for first, last in pairwise(starts)]
