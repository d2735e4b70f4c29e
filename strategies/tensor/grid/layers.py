"""Role layers on the ranks of a grid. Each takes over the (already cut) parameters of the layer it replaces.

How a layer multiplies and where it lies is data (`products`); nothing here knows 2D from 3D. Positions and the MLP's
activation work on a part as they do on the whole, so the one-device layers stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from parallelrun.mesh import Mesh
from parallelrun.models import layers as single_device
from parallelrun.product import ActivationLayout, Product

from . import matmul
from .parts import EvenSlice, slice_of


class LayoutTracker:
    """How activations lie at this point of a block: as between blocks, then as each product gives them.

    Followed while the block runs: in which order a user's module calls what it holds is not written anywhere else, and
    one dropout may serve both inside and behind a pair.
    """

    def __init__(self, between_blocks: ActivationLayout, mesh: Mesh):
        self._between_blocks, self._mesh = between_blocks, mesh
        self._known: dict[ActivationLayout, tuple[EvenSlice, EvenSlice]] = {}
        self.layout = between_blocks

    def restart(self, *_: Any) -> None:
        """Forward pre-hook of a block."""
        self.layout = self._between_blocks

    @property
    def slices(self) -> tuple[EvenSlice, EvenSlice]:
        """(samples, features) of the activation here that this rank has."""
        if self.layout not in self._known:
            self._known[self.layout] = (
                slice_of(self.layout.rows, self._mesh),
                slice_of(self.layout.features, self._mesh),
            )
        return self._known[self.layout]


@dataclass(frozen=True)
class BoundProduct:
    """A product bound to this rank's mesh and to what it must know of the plan.

    tracker: told how each result lies. vocab: the global rows of the weight, where they need not divide: of a head and
    of a table.
    """

    product: Product
    mesh: Mesh
    options: matmul.MatmulOptions
    tracker: LayoutTracker
    vocab: int | None = None

    def __call__(self, x: Tensor, *weights: tuple[Tensor, Tensor | None]) -> tuple[Tensor, ...]:
        """x, in the compute dtype, times each local (weight, bias): one result each."""
        rows = None if self.vocab is None else [self.vocab]
        self.tracker.layout = self.product.y
        return matmul.multiply(x, weights, self.product, self.mesh, self.options, rows)

    def look_up(self, tokens: Tensor, table: Tensor) -> Tensor:
        """Rows of the table for the tokens of `product.x.rows`, in the compute dtype."""
        assert self.vocab is not None, "a table has a vocabulary"
        self.tracker.layout = self.product.y
        return matmul.look_up(tokens, table, self.product, self.mesh, self.options, self.vocab)


class GridColumnLinear(single_device.ColumnLinear):
    """All outputs in one product: what they read is moved once."""

    compiles: ClassVar[bool] = False

    def __init__(self, source: single_device.ColumnLinear, multiply: BoundProduct):
        parts = {name: source.get_submodule(name) for name in source.outputs}
        sizes = {name: part.get_parameter("weight").size(0) for name, part in parts.items()}
        with torch.device("meta"):
            super().__init__(source.in_features, sizes, source.has_bias, source.compute_dtype)
        self.multiply = multiply
        for name, part in parts.items():
            self.hold(name, part)

    def forward(self, x: Tensor) -> Any:
        return self.give(self.multiply(x.to(self.compute_dtype), *map(self.weights, self.outputs)))


class GridRowLinear(single_device.RowLinear):
    """A layer of one output, of role `row` or `linear`."""

    compiles: ClassVar[bool] = False

    def __init__(self, source: single_device.RowLinear | single_device.UnsplitLinear, multiply: BoundProduct):
        with torch.device("meta"):
            super().__init__(source.in_features, source.out_features, source.bias is not None, source.compute_dtype)
        self.multiply, self.weight, self.bias = multiply, source.weight, source.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x.to(self.compute_dtype), (self.weight, self.bias))[0]


class GridVocabHead(single_device.VocabHead):
    """Logits of this rank's samples and part of the vocabulary: `GridLoss` reads them so."""

    compiles: ClassVar[bool] = False

    def __init__(self, source: single_device.VocabHead, multiply: BoundProduct):
        with torch.device("meta"):
            super().__init__(source.hidden, source.weight.size(0), source.compute_dtype)
        self.multiply, self.weight = multiply, source.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x.to(self.compute_dtype), (self.weight, None))[0]


class GridTokenEmbedding(single_device.TokenEmbedding):
    """Tokens of the whole microbatch -> this rank's samples and features."""

    compiles: ClassVar[bool] = False

    def __init__(self, source: single_device.TokenEmbedding, multiply: BoundProduct, rows: EvenSlice):
        with torch.device("meta"):
            super().__init__(source.vocab, source.hidden, source.compute_dtype)
        self.multiply, self.rows, self.weight = multiply, rows, source.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.multiply.look_up(self.rows.of(tokens), self.weight)


class GridDropout(single_device.HashDropout):
    """The mask of the whole, at this rank's samples and features."""

    def __init__(self, source: single_device.HashDropout, tracker: LayoutTracker):
        super().__init__(source.rate, source.seed, source.site, source.hidden, source.compute_dtype)
        self.tracker = tracker

    def forward(self, x: Tensor) -> Tensor:
        rows, features = self.tracker.slices
        self.sample_part, self.hidden_offset = (rows.index, rows.count), features.index * x.size(-1)
        return super().forward(x)


class GridAttentionProduct(single_device.AttentionProduct):
    """Attention of this rank's samples over its heads; dropped probabilities are those of the global heads."""

    def __init__(self, source: single_device.AttentionProduct, tracker: LayoutTracker):
        super().__init__(source.rate, source.seed, source.site, source.compute_dtype, source.causal)
        self.tracker = tracker

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows, features = self.tracker.slices
        self.sample_part, self.head_offset = (rows.index, rows.count), features.index * query.size(1)
        return super().forward(query, key, value)
