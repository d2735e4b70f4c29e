"""How many bytes of tensors are alive, counted as they are made and freed; which of them autograd saves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parallelrun.models import rounding


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


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages of at least `smallest` bytes that were made inside and still live, and their
    peak. Views of what was there before are not counted."""

    def __init__(self, smallest: int = 0):
        super().__init__()
        self.smallest, self.peak = smallest, 0
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def live(self) -> int:
        self._storages = {key: one for key, one in self._storages.items() if not one[0].expired()}
        return sum(size for _, size in self._storages.values())

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {reference.cdata for reference, _ in _storages((args, kwargs))}
        result = function(*args, **(kwargs or {}))
        for reference, size in _storages(result):
            if size >= self.smallest and reference.cdata not in given:
                self._storages[reference.cdata] = reference, size
        self.peak = max(self.peak, self.live())
        return result


def _storages(tree: object) -> Iterator[tuple[StorageWeakRef, int]]:
    for mesh_dim in tree_leaves(tree):
        if isinstance(mesh_dim, Tensor) and not mesh_dim.is_meta:
            storage = mesh_dim.untyped_storage()
            yield StorageWeakRef(storage), storage.nbytes()
