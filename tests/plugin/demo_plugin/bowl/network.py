"""The modules of a bowl, written as for one device."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from parallelrun.base.precision import Precision
from parallelrun.config.schema.run_schema import Config
from parallelrun.models.layers import ColumnLinear, RowLinear, VocabHead
from parallelrun.models.network import Network, assemble
from parallelrun.planner.model.model_spec import ModelSpec


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


def build(config: Config, spec: ModelSpec, precision: Precision) -> Network:
    """Return the network of the blocks `body` and `head`, with uninitialised parameters."""
    dtype = getattr(torch, precision.compute)
    blocks = (Body(spec.hidden, dtype), VocabHead(spec.hidden, spec.vocab, dtype))
    return assemble(config, spec, precision, blocks)
