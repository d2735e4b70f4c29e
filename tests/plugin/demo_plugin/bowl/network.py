"""The modules of a bowl, written as for one device."""

from __future__ import annotations

from torch import Tensor, nn

from parallelrun.config.schema import Config
from parallelrun.model_spec import ModelSpec
from parallelrun.models.layers import ColumnLinear, RowLinear, TokenLoss, VocabHead
from parallelrun.models.network import Network, store
from parallelrun.precision import Precision


class Body(nn.Module):
    """x (batch, hidden) plus an MLP of x."""

    def __init__(self, hidden: int, dtype):
        super().__init__()
        self.dtype = dtype
        self.up = ColumnLinear(hidden, {"": 2 * hidden}, False, dtype)
        self.down = RowLinear(2 * hidden, hidden, False, dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.dtype)
        return x + self.down(self.up(x).relu())


class Bowl(Network):
    """Blocks `body` and `head`, as the spec lists them."""

    def __init__(self, spec: ModelSpec, dtype):
        super().__init__(spec, TokenLoss())
        self.body = Body(spec.hidden, dtype)
        self.head = VocabHead(spec.hidden, spec.vocab, dtype)


def build(config: Config, spec: ModelSpec, precision: Precision) -> Network:
    """Return the network with uninitialised parameters."""
    import torch

    return store(Bowl(spec, getattr(torch, precision.compute)), precision.stored)
