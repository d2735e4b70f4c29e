"""torch's recurrent layers, which keep their weights in a list beside the parameters, and weak references to them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def swappable_parameters(module: nn.Module) -> Iterator[None]:
    """While open, `torch.utils.swap_tensors` accepts every parameter: recurrent layers have no weak references."""
    recurrent = [part for part in module.modules() if isinstance(part, nn.RNNBase)]
    for part in recurrent:
        part._flat_weight_refs = []
    yield
    for part in recurrent:
        part._init_flat_weights()


def renew_weight_list(part: nn.Module) -> None:
    """Make a recurrent layer compute with what its weights' names stand for now; other modules look them up anyway."""
    if isinstance(part, nn.RNNBase):
        part._flat_weights = [getattr(part, name, None) for name in part._flat_weights_names]
