"""Measurements of a block of a user's module on the meta device: its FLOPs, and what autograd saves in its forward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from parallelrun.models import layers
from parallelrun.models.masked_layers import HashDropout


def flops_of(counter: FlopCounterMode, *parts: str) -> float:
    """FLOPs of the operations whose names contain one of `parts`."""
    counts = counter.get_flop_counts().get("Global", {})
    return float(sum(flops for operation, flops in counts.items() if any(part in str(operation) for part in parts)))


@dataclass
class Saved:
    """What autograd saves in a block's forward. storages: by id, kept alive, so that no two share an id, with their
    elements; masks: elements of dropout masks, a byte each, which eval mode does not save; after_sum: some are saved
    after the block's last layer whose result ranks sum."""

    storages: dict[int, tuple[torch.UntypedStorage, int]] = field(default_factory=dict)
    masks: int = 0
    after_sum: bool = False

    def pack(self, tensor: Tensor) -> Tensor:
        self.after_sum = True
        storage = tensor.untyped_storage()
        self.storages.setdefault(id(storage), (storage, storage.nbytes() // tensor.element_size()))
        return tensor

    def called(self, part: nn.Module, inputs: object, out: Any) -> None:
        """Forward hook of every module of the block, which is in eval mode."""
        if layers.role_of(part) in ("row_parallel", "embedding"):
            self.after_sum = False
        elif isinstance(part, HashDropout) and part.rate > 0:
            self.after_sum = True
            self.masks += out.numel()

    def elements(self, outside: Iterable[Tensor]) -> float:
        """The saved elements, without weights, buffers and the batch, which are kept anyway."""
        kept_anyway = {id(tensor.untyped_storage()) for tensor in outside}
        return float(sum(number for key, (_, number) in self.storages.items() if key not in kept_anyway))


@contextmanager
def saved_tensors(block: nn.Module) -> Iterator[Saved]:
    saved = Saved()
    hooks = [part.register_forward_hook(saved.called) for part in block.modules()]
    try:
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda packed: packed):
            yield saved
    finally:
        for hook in hooks:
            hook.remove()
