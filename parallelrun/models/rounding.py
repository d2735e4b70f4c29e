"""Weights rounded to the compute dtype where they are used, without keeping the rounded copy for backward.

Autograd would keep such a copy for every microbatch in flight, beside the stored weight. Instead it keeps the stored
weight itself, which exists anyway, and backward rounds it again, to the same bits.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Rounded(NamedTuple):
    """How to compute (a view of) a weight's rounded copy again; autograd keeps this in place of the copy."""

    weight: Tensor
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[Any, ...]
    offset: Any  # torch calls it int or SymInt

    def again(self) -> Tensor:
        return self.weight.to(self.dtype).as_strided(self.size, self.stride, self.offset)


class ByStorage(Generic[T]):
    """Remembers a value for each of some tensors, and finds it by any tensor that has the same storage."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], T]] = {}

    def remember(self, tensor: Tensor, value: T) -> None:
        address = tensor.untyped_storage().data_ptr()
        if address:  # meta and empty tensors share address 0
            self._known[address] = weakref.ref(tensor), value

    def find(self, saved: Tensor) -> T | None:
        """The value, unless the tensor is freed (its memory may be another's now) or `saved` has another dtype."""
        reference, value = self._known.get(saved.untyped_storage().data_ptr(), (None, None))
        tensor = reference() if reference is not None else None
        return value if tensor is not None and tensor.dtype == saved.dtype else None


class RoundedCopies(ByStorage[Tensor]):
    """The storages that hold rounded copies during a forward, with the (detached) weight of each."""

    def pack(self, saved: Tensor) -> Tensor | Rounded:
        """The object that autograd keeps in place of `saved`."""
        weight = self.find(saved)
        if weight is None:
            return saved.detach()  # a node that saves its own output would hold itself, past a backward that keeps it
        return Rounded(weight, saved.dtype, saved.size(), saved.stride(), saved.storage_offset())


_current: ContextVar[RoundedCopies | None] = ContextVar("parallelrun_rounded_copies", default=None)


def rounded(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight in `dtype`. A compiled block decides itself which tensors it keeps."""
    if weight.dtype == dtype:
        return weight
    copy = weight.to(dtype)
    if not torch.compiler.is_compiling():
        copies = _current.get()
        if copies is not None:
            copies.remember(copy, weight.detach())
    return copy


@contextmanager
def remembered() -> Iterator[RoundedCopies]:
    """While open, `rounded` remembers its copies for a packing hook."""
    copies = RoundedCopies()
    token = _current.set(copies)
    try:
        yield copies
    finally:
        _current.reset(token)


@contextmanager
def not_kept() -> Iterator[None]:
    """While open, autograd keeps no rounded copies."""
    with remembered() as copies, torch.autograd.graph.saved_tensors_hooks(copies.pack, unpack):
        yield


def unpack(packed: Tensor | Rounded) -> Tensor:
    """The tensor that `RoundedCopies.pack` packed."""
    return packed.again() if isinstance(packed, Rounded) else packed
