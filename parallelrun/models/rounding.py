"""Weights rounded to the compute dtype where they are used, without a rounded copy that waits for backward.

Autograd would keep such a copy for every microbatch in flight, beside the stored weight. What is kept instead is the
stored weight itself, which is there anyway; backward rounds it again, to the same bits.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Rounded(NamedTuple):
    """What is kept in place of (a view of) a weight's rounded copy: how to make it again."""

    weight: Tensor
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[Any, ...]
    offset: Any  # torch calls it int or SymInt

    def again(self) -> Tensor:
        return self.weight.to(self.dtype).as_strided(self.size, self.stride, self.offset)


class Copies:
    """During a forward: which storages hold the rounded copy of which weight."""

    def __init__(self) -> None:
        self._by_storage: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}

    def remember(self, copy: Tensor, weight: Tensor) -> None:
        address = copy.untyped_storage().data_ptr()
        if address:  # meta and empty tensors share address 0
            self._by_storage[address] = weakref.ref(copy), weight.detach()

    def pack(self, saved: Tensor) -> Tensor | Rounded:
        """What autograd keeps in place of `saved`."""
        known = self._by_storage.get(saved.untyped_storage().data_ptr())
        copy = known[0]() if known else None
        # A dead copy's memory may have been given to another tensor; another dtype is another tensor's view.
        if known is None or copy is None or copy.dtype != saved.dtype:
            return saved.detach()  # a node that saves its own output would hold itself, past a backward that keeps it
        return Rounded(known[1], copy.dtype, saved.size(), saved.stride(), saved.storage_offset())


_current: ContextVar[Copies | None] = ContextVar("parallelrun_rounded_copies", default=None)


def rounded(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight in `dtype`. A compiled block decides by itself what it keeps."""
    if weight.dtype == dtype:
        return weight
    copy = weight.to(dtype)
    if not torch.compiler.is_compiling():
        copies = _current.get()
        if copies is not None:
            copies.remember(copy, weight)
    return copy


@contextmanager
def remembered() -> Iterator[Copies]:
    """Inside, `rounded` remembers what it makes, for a packing hook to ask."""
    copies = Copies()
    token = _current.set(copies)
    try:
        yield copies
    finally:
        _current.reset(token)


@contextmanager
def not_kept() -> Iterator[None]:
    """Inside, autograd keeps no rounded copies."""
    with remembered() as copies, torch.autograd.graph.saved_tensors_hooks(copies.pack, unpack):
        yield


def unpack(packed: Tensor | Rounded) -> Tensor:
    """What `Copies.pack` packed."""
    return packed.again() if isinstance(packed, Rounded) else packed
