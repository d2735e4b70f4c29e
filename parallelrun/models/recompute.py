"""Activation recomputation, per block: save less for backward, and compute it again when backward needs it.

full (Chen et al. 2016): a block saves only its input, and backward runs its forward again up to the last tensor it
needs; collectives before that point are sent again. selective (in the spirit of Korthikanti et al. 2022): the results
of matrix products and of attention are saved, outputs of norms and activations are not; no collective is sent again.

Selective uses saved-tensor hooks instead of torch's `create_selective_checkpoint_contexts`. That caches a product's
result by reference, so that a collective which then reduces it in place is applied twice in the second run, and its
dispatch mode slows every operation of the forward. A compiled block chooses which tensors it saves.

offload: full, and the inputs of blocks wait for backward in host memory (`host_copies`). A stage's own input stays: its
receive buffer holds it anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from parallelrun.models import documents as packed
from parallelrun.models import dropout, rounding
from parallelrun.models.documents import DocumentBounds
from parallelrun.models.host_copies import HostCopy, HostLink
from parallelrun.models.layers import role_of

if TYPE_CHECKING:
    from parallelrun.models.network import Network

MODES = ("none", "selective", "full", "offload")
KEPT = "kept"  # full, for schedules that run a block's backward more than once: see `_KeptForward`
Block = Callable[[Tensor], Tensor]  # a module, or what calls one
CHEAP_ROLES = ("norm", "activation")


def apply(network: Network, mode: str) -> None:
    """Set how the blocks of `network` (see `Network.recomputed`) run. mode: none | selective | full | offload."""
    if mode not in MODES:
        raise ValueError(f"recompute={mode} is unknown; use one of {', '.join(MODES)}")
    network.recompute = mode
    network.host = HostLink() if mode == "offload" else None
    if mode == "selective":
        for name in network.recomputed:
            for module in network.get_submodule(name).modules():
                if _is_cheap(module):
                    module.register_forward_hook(_remember)


def _is_cheap(module: nn.Module) -> bool:
    """Whether its output is computed again rather than saved. Not if that would send something again, and not for relu,
    whose own backward needs its output."""
    if getattr(module, "kind", "") == "relu":
        return False
    return role_of(module) in CHEAP_ROLES and not getattr(module, "communicates", False)


def run(
    block: Block,
    x: Tensor,
    sample_ids: Tensor | None,
    mode: str,
    documents: DocumentBounds | None = None,
    host: HostLink | None = None,
) -> Tensor:
    """block(x) under `mode`. Sample ids and documents are in scope for what is computed again too. host: where x waits
    for backward; None: on its device."""
    if mode == "none" or not torch.is_grad_enabled():
        return _run(block, x, sample_ids, documents)
    copy = None if host is None or x.is_leaf else host.put(x)
    if mode in ("full", "offload"):
        inputs = (sample_ids, documents)
        if copy is None:
            out: Tensor = checkpoint(_run, block, x, *inputs, use_reentrant=False)
        else:
            out = checkpoint(_ReturningInput(block, x, copy), *inputs, use_reentrant=False)
        return out
    if mode == KEPT:
        forward = _KeptForward(block, copy or x.detach(), x.requires_grad, sample_ids, documents)
        with torch.autograd.graph.saved_tensors_hooks(forward.pack, forward.unpack):
            return _run(block, x, sample_ids, documents)
    with rounding.not_kept():  # nor outputs of cheap modules, see `_remember`
        return _run(block, x, sample_ids, documents)


def _run(block: Block, x: Tensor, sample_ids: Tensor | None, documents: DocumentBounds | None) -> Tensor:
    with dropout.scope(sample_ids), packed.scope(documents):
        out: Tensor = block(x)
    return out


class _ReturningInput:
    """A block's forward: first on `x`, which it then lets go of, later on the copy that is brought back."""

    def __init__(self, block: Block, x: Tensor, copy: HostCopy):
        self._block, self._copy, self._needs_gradient = block, copy, x.requires_grad
        self._x: Tensor | None = x

    def __call__(self, sample_ids: Tensor | None, documents: DocumentBounds | None) -> Tensor:
        x, self._x = self._x, None
        if x is None:
            x = self._copy.take().requires_grad_(self._needs_gradient)
        return _run(self._block, x, sample_ids, documents)


class _EnoughComputed(Exception):
    """Raised out of a second forward once it has computed the last tensor that backward needs."""


class _KeptForward:
    """A block's forward that is run again once; the tensors it saves then stay for every backward pass that follows.

    Zero bubble runs a block's backward once for its input and once for every weight, each time as a graph task of its
    own, and torch's checkpoint would run the block again in each. Freed with the block's graph.
    """

    def __init__(
        self,
        block: Block,
        x: Tensor | HostCopy,
        needs_gradient: bool,
        sample_ids: Tensor | None,
        documents: DocumentBounds | None,
    ):
        self._block, self._x, self._sample_ids, self._documents = block, x, sample_ids, documents
        self._needs_gradient = needs_gradient
        self._num_saved = 0
        self._saved: list[Tensor | rounding.Packed] = []

    def pack(self, saved: Tensor) -> int:
        """The number that autograd keeps in place of `saved`."""
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
                raise _EnoughComputed

        x = (self._x.detach() if isinstance(self._x, Tensor) else self._x.take()).requires_grad_(self._needs_gradient)
        with rounding.remembered() as copies, torch.enable_grad(), suppress(_EnoughComputed):
            with torch.autograd.graph.saved_tensors_hooks(collect, lambda packed: packed):
                _run(self._block, x, self._sample_ids, self._documents)
        assert len(self._saved) == self._num_saved, "the second forward saved other tensors than the first"


def _remember(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    """Forward hook of a cheap module."""
    if output.requires_grad:
        rounding.remember(output, module.forward, *inputs)
