"""How many bytes of tensors are alive, counted as they are made and freed; which of them autograd saves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from parallelrun.models import rounding
from tests.peak_bytes import PeakBytes, tensors_in


@contextmanager
def saving(see: Callable[[Tensor], object]) -> Iterator[None]:
    """Inside, `see` gets every tensor that autograd saves, as in `Network.forward`: rounded weights are not saved."""
    with rounding.remembered() as copies:

        def pack(saved: Tensor) -> Tensor | rounding.Rounded:
            packed = copies.pack(saved)
            if isinstance(packed, Tensor):
                see(saved)
            return packed

        with torch.autograd.graph.saved_tensors_hooks(pack, rounding.unpack):
            yield


class LiveBytes(PeakBytes):
    """Counts only the storages of at least `smallest` bytes that were made inside and still live.

    Views of what was there before are not counted.
    """

    def __init__(self, smallest: int = 0):
        super().__init__()
        self.smallest = smallest

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(tensor.untyped_storage()) for tensor in tensors_in((args, kwargs))}
        result = function(*args, **(kwargs or {}))
        for made in tensors_in(result):
            storage = made.untyped_storage()
            if storage.nbytes() >= self.smallest and id(storage) not in given:
                self._see(made)
        return result
