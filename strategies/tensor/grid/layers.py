"""Role layers on the ranks of a grid. Each takes over the (already cut) parameters of the layer that it replaces.

How a layer multiplies and how its activations are split is data (`products`); nothing here distinguishes 2D from 3D.
The MLP's activation works on a part as it does on the whole, so the one-device layer stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from parallelrun.distributed.mesh import Group, Mesh
from parallelrun.models import layers as single_device
from parallelrun.models.documents import DocumentBounds
from parallelrun.models.exchange import exchange
from parallelrun.models.masked_layers import AttentionProduct, HashDropout
from parallelrun.planner.model.product import ActivationLayout, Product

from ..common.sharding import EvenSlice, TakesOver, slice_of
from . import matmul, split_backward
from .buffers import ACTIVATIONS, move_group
from .lookup import look_up

SEQUENCE, FEATURES = 1, 2  # dims of activations


class LayoutTracker:
    """The layout of the activation at this point of a block: as between blocks, then as each product gives it.

    Tracked while the block runs: in which order a user's module calls what it holds is not declared anywhere, and one
    dropout may serve both inside and behind a pair.
    """

    def __init__(self, boundary: ActivationLayout, mesh: Mesh):
        self._boundary, self._mesh = boundary, mesh
        self._known: dict[ActivationLayout, tuple[EvenSlice, EvenSlice]] = {}
        self.layout = boundary

    def restart(self, *_: Any) -> None:
        """Forward pre-hook of a block."""
        self.layout = self._boundary

    @property
    def slices(self) -> tuple[EvenSlice, EvenSlice]:
        """(samples, features) of the activation here that this rank has."""
        if self.layout not in self._known:
            rows, features = self.layout.rows, self.layout.features
            self._known[self.layout] = slice_of(rows, self._mesh), slice_of(features, self._mesh)
        return self._known[self.layout]


class GridLayer(TakesOver):
    """A layer that multiplies as `product` says, and tells the tracker the layout of its result."""

    uncompiled: ClassVar[tuple[str, ...]] = ("forward",)
    compute_dtype: torch.dtype
    product: Product
    mesh: Mesh
    options: matmul.MatmulOptions
    tracker: LayoutTracker

    def multiply(
        self, x: Tensor, weights: Sequence[matmul.Weight], out_features: Sequence[int] | None = None
    ) -> tuple[Tensor, ...]:
        """Multiply x by each local (weight, bias): one result each. See `matmul.multiply`."""
        self.tracker.layout = self.product.y
        return matmul.multiply(x.to(self.compute_dtype), weights, self.product, self.mesh, self.options, out_features)


class GridColumnLinear(GridLayer, single_device.ColumnLinear):
    """All outputs in one product: what they read is moved once."""

    def forward(self, x: Tensor) -> Any:
        return self.returned(self.multiply(x, [*map(self.weights, self.outputs)]))


class GridRowLinear(GridLayer, single_device.RowLinear):
    """A layer of one output, of role `row_parallel` or `linear`."""

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x, [(self.weight, self.bias)])[0]


class GridVocabHead(GridLayer, single_device.VocabHead):
    """Logits of this rank's samples and part of the vocabulary, as `VocabParallelLoss` reads them."""

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x, [(self.weight, self.bias)], [self.vocab])[0]


class GridTokenEmbedding(GridLayer, single_device.TokenEmbedding):
    """Tokens of the whole microbatch -> this rank's samples and features."""

    def forward(self, tokens: Tensor) -> Tensor:
        self.tracker.layout = self.product.y
        own = slice_of(self.product.x.rows, self.mesh).of(tokens)
        return look_up(own, self.weight, self.product, self.mesh, self.options, self.vocab)


class GridExpertInput(GridLayer, single_device.ExpertInput):
    """Slices of features -> complete rows of this rank's samples."""

    def forward(self, x: Tensor) -> Tensor:
        return split_backward.gather(super().forward(x), move_group(self.product.gather_x, self.mesh))


class GridExpertOutput(GridLayer, single_device.ExpertOutput):
    """Complete rows, of which every rank has a part of the sum -> slices of features."""

    def forward(self, x: Tensor, num_samples: int) -> Tensor:
        return split_backward.scatter(super().forward(x, num_samples), move_group(self.product.scatter_y, self.mesh))


class ExchangingExpertInput(TakesOver, single_device.ExpertInput):
    """Slices of features -> a slice of every sequence, of this rank's samples. group: of the axis of features."""

    group: Group

    def forward(self, x: Tensor) -> Tensor:
        return exchange(super().forward(x), self.group, ACTIVATIONS, SEQUENCE, FEATURES)


class ExchangingExpertOutput(TakesOver, single_device.ExpertOutput):
    """The way back."""

    group: Group

    def forward(self, x: Tensor, num_samples: int) -> Tensor:
        return exchange(super().forward(x, num_samples), self.group, ACTIVATIONS, FEATURES, SEQUENCE)


class GridDropout(TakesOver, HashDropout):
    """The mask of the whole, at this rank's samples and features."""

    tracker: LayoutTracker

    def forward(self, x: Tensor) -> Tensor:
        if not (self.rate and self.active):
            return x
        rows, features = self.tracker.slices
        self.sample_part, self.hidden_offset = (rows.index, rows.count), features.index * x.size(-1)
        return super().forward(x)


class GridPositionEmbedding(TakesOver, single_device.PositionEmbedding):
    """Learned positions of this rank's samples and features."""

    tracker: LayoutTracker

    def documents(self) -> DocumentBounds | None:
        packed, (rows, _) = super().documents(), self.tracker.slices
        return packed if packed is None else packed.part(rows.index, rows.count)


class GridAttentionProduct(TakesOver, AttentionProduct):
    """Attention of this rank's samples over its heads; dropped probabilities are those of the global heads."""

    tracker: LayoutTracker

    def documents(self) -> DocumentBounds | None:
        rows, _ = self.tracker.slices
        self.sample_part = rows.index, rows.count
        return super().documents()

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.rate and self.active:
            rows, features = self.tracker.slices
            self.sample_part, self.head_offset = (rows.index, rows.count), features.index * query.size(1)
        return super().forward(query, key, value)


MULTIPLYING: dict[type, type[GridLayer]] = {
    single_device.ColumnLinear: GridColumnLinear,
    single_device.RowLinear: GridRowLinear,
    single_device.UnsplitLinear: GridRowLinear,
    single_device.VocabHead: GridVocabHead,
    single_device.TokenEmbedding: GridTokenEmbedding,
    single_device.ExpertInput: GridExpertInput,
    single_device.ExpertOutput: GridExpertOutput,
}
EXCHANGING: dict[type, type[TakesOver]] = {  # where ep spans tp
    single_device.ExpertInput: ExchangingExpertInput,
    single_device.ExpertOutput: ExchangingExpertOutput,
}
TRACKING: dict[type, type[TakesOver]] = {
    HashDropout: GridDropout,
    single_device.PositionEmbedding: GridPositionEmbedding,
    AttentionProduct: GridAttentionProduct,
}
