"""Role layers on the ranks of a grid. Each takes over the (already cut) parameters of the layer it replaces.

How a layer multiplies and where it lies is data (`products`); nothing here knows 2D from 3D. Positions and the MLP's
activation work on a part as they do on the whole, so the one-device layers stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parallelrun.mesh.runtime import Mesh
from parallelrun.models import layers as one_device
from parallelrun.product import Product

from . import matmul
from .parts import Part


@dataclass(frozen=True)
class Multiplier:
    """A product bound to this rank's mesh and to what it must know of the plan.

    vocab: the global rows of the weight, where they need not divide: of a head and of a table.
    """

    product: Product
    mesh: Mesh
    span: matmul.Span
    vocab: int | None = None

    def __call__(self, x: Tensor, *weights: tuple[Tensor, Tensor | None]) -> tuple[Tensor, ...]:
        """x, in the compute dtype, times each local (weight, bias): one result each."""
        rows = None if self.vocab is None else [self.vocab]
        return matmul.multiply(x, weights, self.product, self.mesh, self.span, rows)

    def look_up(self, tokens: Tensor, table: Tensor) -> Tensor:
        """Rows of the table for the tokens of `product.x.rows`, in the compute dtype."""
        assert self.vocab is not None, "a table has a vocabulary"
        return matmul.look_up(tokens, table, self.product, self.mesh, self.span, self.vocab)


class Columns(one_device.Columns):
    """All outputs in one product: what they read is moved once."""

    def __init__(self, source: one_device.Columns, multiply: Multiplier):
        parts = {name: source.get_submodule(name) for name in source.outputs}
        sizes = {name: part.get_parameter("weight").size(0) for name, part in parts.items()}
        with torch.device("meta"):
            super().__init__(source.in_features, sizes, source.has_bias, source.compute_dtype)
        self.multiply = multiply
        for name, part in parts.items():
            self.hold(name, part)

    def forward(self, x: Tensor) -> Any:
        return self.give(self.multiply(x.to(self.compute_dtype), *map(self.weights, self.outputs)))


class Row(one_device.Row):
    """A layer of one output, of role `row` or `linear`."""

    def __init__(self, source: one_device.Row | one_device.Linear, multiply: Multiplier):
        with torch.device("meta"):
            super().__init__(source.in_features, source.out_features, source.bias is not None, source.compute_dtype)
        self.multiply, self.weight, self.bias = multiply, source.weight, source.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x.to(self.compute_dtype), (self.weight, self.bias))[0]


class Head(one_device.Head):
    """Logits of this rank's samples and part of the vocabulary: `GridLoss` reads them so."""

    def __init__(self, source: one_device.Head, multiply: Multiplier):
        with torch.device("meta"):
            super().__init__(source.hidden, source.weight.size(0), source.compute_dtype)
        self.multiply, self.weight = multiply, source.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x.to(self.compute_dtype), (self.weight, None))[0]


class Embedding(one_device.Embedding):
    """Tokens of the whole microbatch -> this rank's samples and features."""

    def __init__(self, source: one_device.Embedding, multiply: Multiplier, rows: Part):
        with torch.device("meta"):
            super().__init__(source.vocab, source.hidden, source.compute_dtype)
        self.multiply, self.rows, self.weight = multiply, rows, source.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.multiply.look_up(self.rows.of(tokens), self.weight)


class Dropout(one_device.Dropout):
    """The mask of the whole, at this rank's samples and features."""

    def __init__(self, source: one_device.Dropout, rows: Part, features: Part):
        super().__init__(source.rate, source.seed, source.site, source.hidden, source.compute_dtype)
        self.sample_part, self.features = (rows.index, rows.count), features

    def forward(self, x: Tensor) -> Tensor:
        self.hidden_offset = self.features.index * x.size(-1)
        return super().forward(x)


class AttentionProduct(one_device.AttentionProduct):
    """Attention of this rank's samples over its heads; dropped probabilities are those of the global heads."""

    def __init__(self, source: one_device.AttentionProduct, rows: Part, features: Part):
        super().__init__(source.rate, source.seed, source.site, source.compute_dtype, source.causal)
        self.sample_part, self.features = (rows.index, rows.count), features

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.head_offset = self.features.index * query.size(1)
        return super().forward(query, key, value)
