"""Tensors that backward computes again instead of keeping: rounded weights, and outputs of cheap modules.

Weights are rounded to the compute dtype where they are used. Autograd would keep the rounded copy for every microbatch
in flight, beside the stored weight. Instead it keeps the stored weight itself, which exists anyway, and backward rounds
it again, to the same bits. Selective recomputation (`recompute`) treats outputs of norms and activations alike.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Source:
    """Computes a tensor again: `function` of `inputs`. The result is kept for the other nodes that saved it (q, k and v
    share one norm), then freed."""

    def __init__(self, function: Callable[..., Tensor], inputs: tuple[Tensor, ...]):
        self._function, self._inputs = function, tuple(tensor.detach() for tensor in inputs)
        self.num_waiting = 0  # nodes
        self._result: Tensor | None = None

    def compute(self) -> Tensor:
        result = self._result
        if result is None:
            with torch.no_grad():
                result = self._function(*self._inputs)
        self.num_waiting -= 1
        self._result = result if self.num_waiting > 0 else None
        return result


class Packed(NamedTuple):
    """A view of a tensor that is computed again; autograd keeps this in place of the view."""

    source: Source
    size: torch.Size
    stride: tuple[Any, ...]
    offset: Any  # torch calls it int or SymInt


class Recomputable:
    """The tensors of a forward that can be computed again, by their storage."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], Source]] = {}

    def remember(self, tensor: Tensor, source: Source) -> None:
        address = tensor.untyped_storage().data_ptr()
        if address:  # meta and empty tensors share address 0
            self._known[address] = weakref.ref(tensor), source

    def forget(self) -> None:
        """End what can be packed. Autograd keeps the packing hook as long as any tensor that went through it, and with
        it would keep the inputs of tensors that backward is done with."""
        self._known.clear()

    def pack(self, saved: Tensor) -> Tensor | Packed:
        """The object that autograd keeps in place of `saved`."""
        reference, source = self._known.get(saved.untyped_storage().data_ptr(), (None, None))
        tensor = reference() if reference is not None else None
        # If the tensor is freed, its memory may be another's now.
        if source is None or tensor is None or tensor.dtype != saved.dtype:
            return saved.detach()  # a node that saves its own output would hold itself, past a backward that keeps it
        source.num_waiting += 1
        return Packed(source, saved.size(), saved.stride(), saved.storage_offset())


def unpack(packed: Tensor | Packed) -> Tensor:
    """The tensor that `Recomputable.pack` packed."""
    if isinstance(packed, Tensor):
        return packed
    return packed.source.compute().as_strided(packed.size, packed.stride, packed.offset)


_current: ContextVar[Recomputable | None] = ContextVar("parallelrun_recomputable", default=None)


def remember(tensor: Tensor, function: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Let backward compute `tensor` again. A compiled block chooses which tensors it saves."""
    if not torch.compiler.is_compiling():
        recomputable = _current.get()
        if recomputable is not None:
            recomputable.remember(tensor, Source(function, inputs))


def rounded(weight: Tensor, dtype: torch.dtype) -> Tensor:
    if weight.dtype == dtype:
        return weight
    copy = weight.to(dtype)
    remember(copy, lambda stored: stored.to(dtype), weight)
    return copy


@contextmanager
def remembered() -> Iterator[Recomputable]:
    """While open, `remember` remembers tensors for a packing hook."""
    recomputable = Recomputable()
    token = _current.set(recomputable)
    try:
        yield recomputable
    finally:
        _current.reset(token)
        recomputable.forget()


@contextmanager
def not_kept() -> Iterator[None]:
    """While open, autograd keeps no tensor that can be computed again."""
    with remembered() as recomputable, torch.autograd.graph.saved_tensors_hooks(recomputable.pack, unpack):
        yield
