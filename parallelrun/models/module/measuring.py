"""Measurements of a block of a user's module on the meta device: its FLOPs, and what autograd saves in its forward."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from parallelrun.models import layers
from parallelrun.models.masked_layers import HashDropout
from parallelrun.models.module import lora
from parallelrun.models.module.outputs import logits_of
from parallelrun.models.module.own_loss import tensors_of


class BlockMeasure:
    """Counts FLOPs and saved tensors of one block, whenever it is called.

    masks: elements of dropout masks, a byte each, which eval mode does not save. after_sum: some tensors are saved
    after the block's last layer whose result ranks sum. input_gradients: by id of a layer with an adapter, see
    `LayerSpec`. widths: by id of a dropout layer, the features on which it acts. output_shape: of the tensor that the
    block returns; num_outputs: see `BlockSpec`.
    """

    def __init__(self, block: nn.Module, batch: Any, dtype: torch.dtype):
        self._block, self._batch, self._width = block, batch, dtype.itemsize
        self._counter = FlopCounterMode(display=False)
        self._storages: dict[int, torch.UntypedStorage] = {}  # by id, kept alive, so that no two share an id
        self.masks = self.num_outputs = 0
        self.after_sum = self.has_run = False
        self.input_gradients: dict[int, int] = {}
        self.widths: dict[int, int] = {}
        self.output_shape: tuple[int, ...] = ()
        self._stack = ExitStack()
        hooks = [part.register_forward_hook(self._called, prepend=True) for part in block.modules()]
        hooks.append(block.register_forward_pre_hook(self._enter, prepend=True))
        hooks.append(block.register_forward_hook(self._leave, always_call=True))  # or the counter would stay on
        self._hooks = hooks

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the output, per sample."""
        return self.output_shape[1:]

    def flops(self, *parts: str) -> float:
        """FLOPs of all operations, or of those whose names contain one of `parts`."""
        counts = self._counter.get_flop_counts().get("Global", {})
        wanted = (
            flops for operation, flops in counts.items() if any(part in str(operation) for part in parts or ("",))
        )
        return float(sum(wanted))

    def saved_elements(self, width: int, counted: set[int]) -> float:
        """Elements that backward needs, in a run whose elements have `width` bytes, without weights, buffers and the
        batch, which are kept anyway, and without the storages `counted` by an earlier block, to which this one's are
        added: tables of positions. What the block computes in more or fewer bytes counts as more or fewer elements."""
        inputs = tensors_of(getattr(self._batch, "inputs", self._batch))
        outside = (*inputs, *self._block.parameters(), *self._block.buffers())
        counted.update(id(tensor.untyped_storage()) for tensor in outside)
        num_bytes = sum(storage.nbytes() for key, storage in self._storages.items() if key not in counted)
        counted.update(self._storages)
        return num_bytes / self._width + self.masks / width

    def _pack(self, tensor: Tensor) -> Tensor:
        self.after_sum = True
        storage = tensor.untyped_storage()
        self._storages[id(storage)] = storage
        return tensor

    def _called(self, part: nn.Module, inputs: tuple[Any, ...], out: Any) -> None:
        """Forward hook of every module of the block, which is in eval mode. It is called before that of an adapter.

        Of the gradient for the input of an adapted layer there are the adapter's, the layer's and the sum; by then the
        input itself is freed, unless something else has saved it.
        """
        if lora.is_target(part):
            self.input_gradients[id(part)] = 3 if id(inputs[0].untyped_storage()) in self._storages else 2
        if layers.role_of(part) in ("row_parallel", "embedding"):
            self.after_sum = False
        elif isinstance(part, HashDropout) and part.rate > 0:
            self.after_sum = True
            self.masks += out.numel()
            self.widths[id(part)] = out.size(-1)

    def _enter(self, *_: Any) -> None:
        self._stack.enter_context(self._counter)
        self._stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, lambda packed: packed))

    def _leave(self, block: nn.Module, inputs: Any, out: Any) -> None:
        self._stack.close()
        self.has_run = True
        self.num_outputs = len(out) if isinstance(out, tuple) else 0
        out = logits_of(out)
        self.output_shape = tuple(out.shape) if isinstance(out, Tensor) else ()
        for hook in self._hooks:
            hook.remove()


class FirstReads(TorchFunctionMode):
    """While entered, notes in `block_of` in front of which block each of `parameters`, which no block holds, is read
    first: of one read behind all blocks, the last; of one that is not read, the first."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], measures: Mapping[str, BlockMeasure]):
        super().__init__()
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._measures = measures
        self.block_of = dict.fromkeys(parameters, next(iter(measures)))

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if self._names and isinstance(out, Tensor):  # not of a look at a shape
            values = (x if isinstance(x, (list, tuple)) else (x,) for x in (*args, *(kwargs or {}).values()))
            for name in filter(None, (self._names.pop(id(value), "") for value in chain.from_iterable(values))):
                waiting = (block for block, measure in self._measures.items() if not measure.has_run)
                self.block_of[name] = next(waiting, [*self._measures][-1])
        return out
