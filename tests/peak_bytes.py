"""Counts the bytes of all tensors that are alive, and their peak: what a plan's prediction of memory is held to."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from parallelrun.distributed.shared_memory import engine


class PeakBytes(TorchDispatchMode):
    """While on, knows every storage on `device` that an operation reads or gives, each counted once until it is freed.

    Views share a storage. FSDP resizes storages in place, which no dispatch mode sees, so `resize_` stands in for
    torch's while this mode is on. Memory that a kernel allocates and frees by itself is not seen.

    A thread of gloo lets go of a collective's tensors a moment after `wait` has returned: on busy cores this may be
    after the next operations, and what is alive then is chance. So a peak counts once those threads have gone to sleep.
    """

    def __init__(self, device: str = "cpu"):
        super().__init__()
        self.now = self.peak = self.apart = self.most_apart = 0
        self._device = device
        self._held: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._torch_resize = torch.UntypedStorage.resize_
        self._torch_wait = dist.Work.wait
        self._has_waited = True  # in what ran before
        self._entered = 0  # times: another thread of a step enters it again

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: torch would keep the compiler out of every call, which takes as long as counting does."""
        return False

    def __enter__(self) -> PeakBytes:
        self._entered += 1
        torch.UntypedStorage.resize_ = self._resize()  # type: ignore[method-assign]
        dist.Work.wait = self._wait()  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *problem: Any) -> None:
        self._entered -= 1
        if not self._entered:
            torch.UntypedStorage.resize_ = self._torch_resize  # type: ignore[method-assign]
            dist.Work.wait = self._torch_wait  # type: ignore[method-assign]
        super().__exit__(*problem)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._see_in(args)
        if kwargs:
            self._see_in(tuple(kwargs.values()))
        result = function(*args, **(kwargs or {}))
        self._see_in((result,))
        return result

    def leave_out(self, tensor: Tensor) -> None:
        """Do not count a tensor that has not been seen: it stands for one in the memory of another device."""
        storage = tensor.untyped_storage()
        key = id(storage)
        assert key not in self._held, "the tensor has been counted"
        self._held[key] = weakref.ref(storage, lambda _: self._forget(key, storage_bytes)), 0
        storage_bytes = storage.nbytes() if tensor.dim() else 0
        self.apart += storage_bytes
        self.most_apart = max(self.most_apart, self.apart)

    def restart(self) -> None:
        """Measure the peak from now on."""
        self.peak = self.now

    def see_all(self) -> None:
        """Know all tensors that are alive, and that garbage collection has not frozen."""
        for value in gc.get_objects():
            if type(value) is Tensor or type(value) is torch.nn.Parameter:
                self._see(value)
                if value.is_leaf and value.grad is not None:
                    self._see(value.grad)

    def _see_in(self, values: tuple[Any, ...] | list[Any]) -> None:
        """See every tensor of an operation's arguments or results. Not by `tensors_in`: this takes half the time."""
        for value in values:
            kind = type(value)
            if kind is Tensor or kind is torch.nn.Parameter:
                if id(value.untyped_storage()) not in self._held:
                    self._see(value)
            elif kind is list or kind is tuple:
                self._see_in(value)
            elif isinstance(value, (Tensor, dict, list, tuple)):
                for tensor in tensors_in(value):
                    self._see(tensor)

    def _see(self, value: Tensor) -> None:
        if isinstance(value, DTensor) or value.device.type != self._device:
            return  # a DTensor has no memory of its own; its local tensor is seen when it is used
        storage = value.untyped_storage()
        if not storage.resizable() and _is_staged(storage):
            return  # memory of others, and what is staged; numpy's arrays, as of samples, are this rank's own
        key = id(storage)  # one Python object for as long as the storage lives
        if key not in self._held:
            self._held[key] = weakref.ref(storage, lambda _: self._forget(key)), storage.nbytes()
            self._add(storage.nbytes())

    def _add(self, nbytes: int) -> None:
        self.now += nbytes
        if self._has_waited and self.now > self.peak:
            self._has_waited = False
            await_other_threads()
        self.peak = max(self.peak, self.now)

    def _forget(self, key: int, apart: int = 0) -> None:
        self.now -= self._held.pop(key)[1]
        self.apart -= apart

    def _resize(self) -> Any:
        def resize_(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            known = self._held.get(id(storage))
            if known is not None:
                self._held[id(storage)] = known[0], size
                self._add(size - known[1])
            return self._torch_resize(storage, size)

        return resize_

    def _wait(self) -> Any:
        def wait(work: dist.Work, *args: Any, **options: Any) -> bool:
            result = self._torch_wait(work, *args, **options)
            self._has_waited = True
            return result

        return wait


def await_other_threads(seconds: float = 1.0) -> None:
    """Return when no other thread of this process computes or waits for a core, after `seconds` at most."""
    end = time.monotonic() + seconds
    while True:
        time.sleep(0.0002)  # first of all: a thread that waits for Python's lock looks asleep while this one holds it
        if not any(_is_running(thread) for thread in os.listdir("/proc/self/task")) or time.monotonic() > end:
            return


def _is_running(thread: str) -> bool:
    if int(thread) == threading.get_native_id():
        return False
    try:
        with open(f"/proc/self/task/{thread}/stat", "rb") as file:
            return file.read().rpartition(b") ")[2][:1] in b"RD"
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return False


def _is_staged(storage: torch.UntypedStorage) -> bool:
    """Whether memory that ranks share holds a storage."""
    running, address = engine.existing(), storage.data_ptr()
    if running is None:
        return False
    memories = (running.process.arena, *(peer.memory for peer in running.process.peers.values()))
    starts = ((memory.tensor(0, torch.uint8, 1).data_ptr(), len(memory.map)) for memory in memories)
    return any(0 <= address - start < size for start, size in starts)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in lists, tuples and dicts of any depth. torch's own walk takes longer than a small operation."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors_in(part)
    elif isinstance(value, dict):
        yield from tensors_in(tuple(value.values()))
