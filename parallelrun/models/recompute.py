"""Activation recomputation, per block: keep less for backward, compute it again when backward needs it.

full (Chen et al. 2016): a block keeps only its input, and backward runs its forward again up to the last tensor it
needs; collectives before that point are sent again. selective (in the spirit of Korthikanti et al. 2022): results of
matrix products and of attention are kept, outputs of norms and activations are not; no collective is sent again.

Selective works by saved-tensor hooks rather than by torch's `create_selective_checkpoint_contexts`: that one caches a
product's result by reference, so a collective which then reduces it in place is applied twice in the second run, and
its dispatch mode slows every operation of the forward. A compiled block chooses by itself what to keep.
"""

from __future__ import annotations

import weakref
from contextlib import suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from parallelrun.models import dropout, rounding

if TYPE_CHECKING:
    from parallelrun.models.network import Network

MODES = ("none", "selective", "full")
KEPT = "kept"  # full, for engines that come back to a block's backward more than once: see `_Kept`
CHEAP_ROLES = ("norm", "activation")


def apply(network: Network, mode: str) -> None:
    """Set how the blocks of `network` (see `Network.recomputed`) run. mode: none | selective | full."""
    if mode not in MODES:
        raise ValueError(f"recompute={mode} is unknown; use one of {', '.join(MODES)}")
    network.recompute = mode
    if mode == "selective":
        for name in network.recomputed:
            for module in network.get_submodule(name).modules():
                if _is_cheap(module):
                    module.register_forward_hook(_remember)


def _is_cheap(module: nn.Module) -> bool:
    """Is its output computed again rather than kept? Not where that would send something again, nor of relu, which
    keeps its output for its own backward."""
    if getattr(module, "kind", "") == "relu":
        return False
    return getattr(module, "layer_role", "") in CHEAP_ROLES and not getattr(module, "communicates", False)


def run(block: nn.Module, x: Tensor, sample_ids: Tensor | None, mode: str) -> Tensor:
    """The block on x, under `mode`. The sample ids are put in scope inside what is run again."""
    if mode == "none" or not torch.is_grad_enabled():
        return _run(block, x, sample_ids)
    if mode == "full":
        return checkpoint(_run, block, x, sample_ids, use_reentrant=False)
    if mode == KEPT:
        kept = _Kept(block, x, sample_ids)
        with torch.autograd.graph.saved_tensors_hooks(kept.pack, kept.unpack):
            return _run(block, x, sample_ids)
    with rounding.remembered() as copies:
        outputs = _CheapOutputs(copies)
        token = _current.set(outputs)
        try:
            with torch.autograd.graph.saved_tensors_hooks(outputs.pack, _unpack):
                return _run(block, x, sample_ids)
        finally:
            _current.reset(token)


def _run(block: nn.Module, x: Tensor, sample_ids: Tensor | None) -> Tensor:
    with dropout.scope(sample_ids):
        return block(x)


class _Enough(Exception):
    """Raised out of a second forward once it has computed the last tensor that backward needs."""


class _Kept:
    """A block's forward, run again once: what it saves then stays for every backward pass that follows.

    Zero bubble goes through a block's backward once for its input and once for every weight, each time as a graph task
    of its own, and torch's checkpoint would run the block again in each. Freed with the block's graph.
    """

    def __init__(self, block: nn.Module, x: Tensor, sample_ids: Tensor | None):
        self._block, self._x, self._sample_ids = block, x.detach(), sample_ids
        self._needs_gradient = x.requires_grad
        self._num_saved = 0
        self._saved: list[Tensor | rounding.Rounded] = []

    def pack(self, saved: Tensor) -> int:
        """What autograd keeps in place of `saved`: its number."""
        self._num_saved += 1
        return self._num_saved - 1

    def unpack(self, number: int) -> Tensor:
        if not self._saved:
            self._run_again()
        return rounding.unpack(self._saved[number])

    def _run_again(self) -> None:
        def collect(saved: Tensor) -> None:
            self._saved.append(copies.pack(saved))
            if len(self._saved) == self._num_saved:
                raise _Enough

        x = self._x.detach().requires_grad_(self._needs_gradient)
        with rounding.remembered() as copies, torch.enable_grad(), suppress(_Enough):
            with torch.autograd.graph.saved_tensors_hooks(collect, lambda packed: packed):
                _run(self._block, x, self._sample_ids)
        assert len(self._saved) == self._num_saved, "the second forward saved other tensors than the first"


class _Again:
    """How to compute one cheap output again: the module and its inputs, which their own backward keeps anyway."""

    def __init__(self, module: nn.Module, inputs: tuple[Tensor, ...]):
        self.module, self.inputs = module, tuple(tensor.detach() for tensor in inputs)
        self.num_waiting = 0
        self.result: Tensor | None = None

    def compute(self) -> Tensor:
        """The output; it stays for the other nodes that saved it (q, k and v share one norm), then goes."""
        result = self.result
        if result is None:
            with torch.no_grad():
                result = self.module.forward(*self.inputs)
        self.num_waiting -= 1
        self.result = result if self.num_waiting > 0 else None
        return result


class _CheapOutputs:
    """During one block's forward: which storages hold the output of a cheap module. copies: of rounded weights."""

    def __init__(self, copies: rounding.Copies) -> None:
        self._copies = copies
        self._by_storage: dict[int, tuple[weakref.ref[Tensor], _Again]] = {}

    def remember(self, output: Tensor, again: _Again) -> None:
        address = output.untyped_storage().data_ptr()
        if address:  # meta and empty tensors share address 0
            self._by_storage[address] = (weakref.ref(output), again)

    def pack(self, saved: Tensor) -> Any:
        """What autograd keeps in place of `saved`: itself, or how to compute it and its geometry."""
        known = self._by_storage.get(saved.untyped_storage().data_ptr())
        output = known[0]() if known else None
        # A dead output's memory may have been given to another tensor; another dtype is another tensor's view.
        if known is None or output is None or output.dtype != saved.dtype:
            return self._copies.pack(saved)
        known[1].num_waiting += 1
        return known[1], saved.size(), saved.stride(), saved.storage_offset()


_current: ContextVar[_CheapOutputs | None] = ContextVar("parallelrun_cheap_outputs", default=None)


def _unpack(packed: Any) -> Tensor:
    if isinstance(packed, (Tensor, rounding.Rounded)):
        return rounding.unpack(packed)
    again, size, stride, offset = packed
    return again.compute().as_strided(size, stride, offset)


def _remember(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    """Forward hook of a cheap module."""
    if torch.compiler.is_compiling():
        return
    outputs = _current.get()
    if outputs is not None and output.requires_grad:
        outputs.remember(output, _Again(module, inputs))
