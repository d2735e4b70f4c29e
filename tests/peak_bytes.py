"""Counts the bytes of all tensors that are alive, and their peak: what a plan's prediction of memory is held to."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakBytes(TorchDispatchMode):
    """While on, knows every storage on `device` that an operation reads or gives, each counted once until it is freed.

    Views share a storage. FSDP resizes storages in place, which no dispatch mode sees, so `resize_` stands in for
    torch's while this mode is on. Memory that a kernel allocates and frees by itself is not seen.
    """

    def __init__(self, device: str = "cpu"):
        super().__init__()
        self.now = self.peak = 0
        self._device = device
        self._held: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._torch_resize = torch.UntypedStorage.resize_

    def __enter__(self) -> PeakBytes:
        torch.UntypedStorage.resize_ = self._resize()  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *problem: Any) -> None:
        torch.UntypedStorage.resize_ = self._torch_resize  # type: ignore[method-assign]
        super().__exit__(*problem)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for mesh_dim in tree_leaves((args, kwargs)):
            self._see(mesh_dim)
        result = function(*args, **(kwargs or {}))
        for mesh_dim in tree_leaves(result):
            self._see(mesh_dim)
        return result

    def restart(self) -> None:
        """Measure the peak from now on."""
        self.peak = self.now

    def _see(self, value: Any) -> None:
        if not isinstance(value, Tensor) or isinstance(value, DTensor) or value.device.type != self._device:
            return  # a DTensor has no memory of its own; its local tensor is seen when it is used
        storage = value.untyped_storage()
        if not storage.resizable():  # memory of others, such as what a collective shares between ranks
            return
        key = id(storage)  # one Python object for as long as the storage lives
        if key not in self._held:
            self._held[key] = weakref.ref(storage, lambda _: self._forget(key)), storage.nbytes()
            self._add(storage.nbytes())

    def _add(self, nbytes: int) -> None:
        self.now += nbytes
        self.peak = max(self.peak, self.now)

    def _forget(self, key: int) -> None:
        self.now -= self._held.pop(key)[1]

    def _resize(self) -> Any:
        def resize_(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            known = self._held.get(id(storage))
            if known is not None:
                self._held[id(storage)] = known[0], size
                self._add(size - known[1])
            return self._torch_resize(storage, size)

        return resize_
