"""The tensors of a collective as shared memory takes them: contiguous, and unseen by autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Outputs:
    """Tensors that an operation fills. Those that are not contiguous get a stand-in, copied back at the end."""

    def __init__(self, tensors: Sequence[Tensor]):
        self.tensors = list(tensors)
        self.copies: list[tuple[Tensor, Tensor]] = []

    def contiguous(self, filled: bool) -> list[Tensor]:
        """Return contiguous tensors in their place; filled: with their values."""
        found = []
        for tensor in self.tensors:
            values = tensor.data  # no version counter: as with gloo, autograd does not see that it is overwritten
            if not values.is_contiguous():
                stand_in = values.contiguous() if filled else torch.empty(values.shape, dtype=values.dtype)
                self.copies.append((values, stand_in))
                values = stand_in
            found.append(values)
        return found


def plain(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor of the values, without autograd."""
    return tensor.data.contiguous()


def as_list(tensors: Any) -> list[Tensor]:
    """Return one tensor or several as a list."""
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)
