"""Measurements of a block of a user's module on the meta device: its FLOPs, and what autograd saves in its forward."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from parallelrun.models import layers
from parallelrun.models.masked_layers import HashDropout
from parallelrun.models.module import lora
from parallelrun.models.module.outputs import logits_of
from parallelrun.models.module.own_loss import tensors_of


@dataclass
class Saved:
    """What autograd saves in a block's forward. storages: by id, kept alive, so that no two share an id; masks:
    elements of dropout masks, a byte each, which eval mode does not save; after_sum: some are saved after the block's
    last layer whose result ranks sum. input_gradients: by id of a layer with an adapter, see `LayerSpec`."""

    storages: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    masks: int = 0
    after_sum: bool = False
    input_gradients: dict[int, int] = field(default_factory=dict)

    def pack(self, tensor: Tensor) -> Tensor:
        self.after_sum = True
        storage = tensor.untyped_storage()
        self.storages[id(storage)] = storage
        return tensor

    def called(self, part: nn.Module, inputs: tuple[Any, ...], out: Any) -> None:
        """Forward hook of every module of the block, which is in eval mode. It is called before that of an adapter.

        Of the gradient for the input of an adapted layer there are the adapter's, the layer's and the sum; by then the
        input itself is freed, unless something else has saved it.
        """
        if lora.is_target(part):
            is_shared = id(inputs[0].untyped_storage()) in self.storages
            self.input_gradients[id(part)] = 3 if is_shared else 2
        if layers.role_of(part) in ("row_parallel", "embedding"):
            self.after_sum = False
        elif isinstance(part, HashDropout) and part.rate > 0:
            self.after_sum = True
            self.masks += out.numel()

    def num_bytes(self, outside: Iterable[Tensor]) -> int:
        """The saved bytes, without those of weights, buffers and the batch, which are kept anyway."""
        kept_anyway = {id(tensor.untyped_storage()) for tensor in outside}
        return sum(storage.nbytes() for key, storage in self.storages.items() if key not in kept_anyway)


class BlockMeasure:
    """Counts FLOPs and saved tensors of one block, whenever it is called. shape: of its output, per sample;
    num_outputs: see `BlockSpec`."""

    def __init__(self, block: nn.Module, batch: Any, dtype: torch.dtype):
        self._block, self._batch, self._width = block, batch, dtype.itemsize
        self._counter = FlopCounterMode(display=False)
        self.saved = Saved()
        self.shape: tuple[int, ...] = ()
        self.num_outputs = 0
        self._stack = ExitStack()
        hooks = [part.register_forward_hook(self.saved.called, prepend=True) for part in block.modules()]
        hooks.append(block.register_forward_pre_hook(self._enter, prepend=True))
        hooks.append(block.register_forward_hook(self._leave, always_call=True))  # or the counter would stay on
        self._hooks = hooks

    def flops(self, *parts: str) -> float:
        """FLOPs of all operations, or of those whose names contain one of `parts`."""
        counts = self._counter.get_flop_counts().get("Global", {})
        wanted = (
            flops for operation, flops in counts.items() if any(part in str(operation) for part in parts or ("",))
        )
        return float(sum(wanted))

    def saved_elements(self, width: int) -> float:
        """Elements that backward needs, without weights, buffers and the batch, in a run whose elements have `width`
        bytes. What the block computes in more or fewer bytes counts as more or fewer elements."""
        inputs = tensors_of(getattr(self._batch, "inputs", self._batch))
        outside = (*inputs, *self._block.parameters(), *self._block.buffers())
        return self.saved.num_bytes(outside) / self._width + self.saved.masks / width

    def _enter(self, *_: Any) -> None:
        self._stack.enter_context(self._counter)
        self._stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self.saved.pack, lambda packed: packed))

    def _leave(self, block: nn.Module, inputs: Any, out: Any) -> None:
        self._stack.close()
        self.num_outputs = len(out) if isinstance(out, tuple) else 0
        out = logits_of(out)
        self.shape = tuple(out.shape[1:]) if isinstance(out, Tensor) else ()
        for hook in self._hooks:
            hook.remove()
