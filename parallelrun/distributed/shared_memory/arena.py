"""Shared memory of a process: an anonymous file that is mapped sparsely and grows as needed, and its allocator."""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
import threading
from bisect import bisect

import torch
from torch import Tensor

from parallelrun.base.errors import EnvironmentProblem, Problem

ALIGNMENT = 64  # bytes: a cache line, so that no two ranks write to the same one
_GROWTH = 2**18  # bytes that are reserved at once, at least
_WINDOW = 512  # allocations, several training steps, after which memory that none of them needed is given back
_SURPLUS = 2**23  # bytes, if there are so many
_LONGEST = 2**38  # bytes of address space per arena; hundreds of them fit into 47 bits
_MOST_VIEWS = 512  # tensors that are kept for each arena
# x86 keeps the order of stores. Elsewhere a lock orders the data before the counter that publishes them.
_ORDERED = os.uname().machine in ("x86_64", "i686")
_fence_lock = threading.Lock()


def fence() -> None:
    """Order the memory accesses before this call before those after it."""
    if not _ORDERED:
        with _fence_lock:
            pass
        with _fence_lock:
            pass


def store_before_load() -> None:
    """Order the stores before this call before the loads after it: not even x86 does that by itself.

    One of two processes that each store a word and then load the other's sees the other's store.
    """
    with _fence_lock:  # an atomic instruction
        pass


def aligned(num_bytes: int) -> int:
    """Round up to a multiple of ALIGNMENT."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class MappedMemory:
    """A mapped arena, this process's own or a peer's. `words[i]` is the int64 at byte 8 * i."""

    def __init__(self, descriptor: int, size: int):
        self.map = mmap.mmap(descriptor, size)
        self.words = memoryview(self.map).cast("q")
        self._views: dict[tuple[int, torch.dtype, int], Tensor] = {}  # the same few blocks are used again and again

    def tensor(self, offset: int, dtype: torch.dtype, numel: int) -> Tensor:
        """Return the 1-d tensor at byte `offset`; it shares the memory."""
        view = self._views.get((offset, dtype, numel))
        if view is None:
            if numel == 0:
                return torch.empty(0, dtype=dtype)
            if len(self._views) == _MOST_VIEWS:
                self._views.clear()
            with torch.inference_mode(False):  # also used outside
                view = torch.frombuffer(self.map, dtype=dtype, count=numel, offset=offset)
            self._views[offset, dtype, numel] = view
        return view


class Arena(MappedMemory):
    """The memory of this process: `allocate` returns the byte offset of a block, `free` gives it back.

    Pages are reserved before they are used, so that exhausted memory is an error here and no SIGBUS later. New blocks
    are as near to the beginning as possible. So memory beyond what was needed for a while is given back to the system.
    """

    def __init__(self) -> None:
        physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self.size = min(physical, _LONGEST)
        self.descriptor = os.memfd_create("parallelrun", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.fchmod(self.descriptor, 0o600)
        os.ftruncate(self.descriptor, self.size)
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        self._reserved = 0
        self._num_left, self._needed = _WINDOW, 0  # of this window: allocations to come, bytes needed so far
        self._free = [(0, self.size)]  # (offset, size), by offset
        self._sizes: dict[int, int] = {}
        super().__init__(self.descriptor, self.size)

    def allocate(self, num_bytes: int) -> int:
        """Return the offset of a new block, aligned. Raises EnvironmentProblem if memory is exhausted."""
        size = aligned(num_bytes) or ALIGNMENT
        offset = self._lowest(size)
        self._sizes[offset] = size
        self._needed = max(self._needed, offset + size)
        self._num_left -= 1
        if not self._num_left:
            self._give_back()
        return offset

    def _lowest(self, size: int) -> int:
        """Return the offset of a block that is as near to the beginning as possible."""
        for index, (offset, free) in enumerate(self._free):
            if free >= size:
                self._reserve(offset + size)
                self._free[index : index + 1] = [(offset + size, free - size)] if free > size else []
                return offset
        raise self._exhausted(size, f"the arena of {self.size} bytes is full")

    def free(self, offset: int) -> None:
        """Give back the block at `offset`."""
        block = (offset, self._sizes.pop(offset))
        index = bisect(self._free, block)
        self._free.insert(index, block)
        for left in (index, index - 1):  # merge it with its free neighbours
            if 0 <= left < len(self._free) - 1:
                (start, length), (following, more) = self._free[left : left + 2]
                if start + length == following:
                    self._free[left : left + 2] = [(start, length + more)]

    def _reserve(self, end: int) -> None:
        if end <= self._reserved:
            return
        target = min(max(end, self._reserved + _GROWTH), self.size)
        try:
            os.posix_fallocate(self.descriptor, self._reserved, target - self._reserved)
        except OSError as error:
            raise self._exhausted(target - self._reserved, error.strerror) from error
        self._reserved = target

    def _give_back(self) -> None:
        """Give back what no block has needed since the last call, and begin anew."""
        end = -(-self._needed // mmap.PAGESIZE) * mmap.PAGESIZE
        if self._reserved - end >= _SURPLUS:
            self.map.madvise(mmap.MADV_REMOVE, end, self._reserved - end)
            self._reserved = end
        self._needed = max(offset + size for offset, size in self._sizes.items())
        self._num_left = _WINDOW

    def _exhausted(self, num_bytes: int, cause: str | None) -> EnvironmentProblem:
        message = (
            f"no shared memory for a collective: {num_bytes} more bytes beside {self._reserved} are refused: {cause}"
        )
        suggestion = "backend=gloo, fewer ranks on this host, or a smaller micro_batch"
        return EnvironmentProblem(Problem(message, suggestion=suggestion))


def is_supported() -> bool:
    """Return whether this system has what the backend needs."""
    return sys.platform == "linux" and hasattr(os, "memfd_create") and hasattr(os, "pidfd_open")
