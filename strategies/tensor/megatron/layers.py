"""Role layers on the ranks of a tensor axis. Each takes over the (already cut) parameters of the layer it replaces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from parallelrun.mesh import Group
from parallelrun.models import layers as single_device

from . import operators


@dataclass(frozen=True)
class Span:
    """What a layer must know of the tensor axis: its group, how activations lie between blocks, and whether the
    input-gradient reduction may share a node with the weight gradients (never under zero bubble)."""

    group: Group
    sequence_parallel: bool
    overlap: bool


class Columns(single_device.ColumnLinear):
    """Local rows of every output: one f for all of them, no communication forward unless sequence parallel."""

    def __init__(self, source: single_device.ColumnLinear, span: Span):
        parts = {name: source.get_submodule(name) for name in source.outputs}
        sizes = {name: part.get_parameter("weight").size(0) for name, part in parts.items()}
        with torch.device("meta"):
            super().__init__(source.in_features, sizes, source.has_bias, source.compute_dtype)
        self.span = span
        for name, part in parts.items():
            self.set_weights(name, part)

    def forward(self, x: Tensor) -> Any:
        parts: list[Any] = [getattr(self, name) if name else self for name in self.outputs]
        weights = [(part.weight, part.bias) for part in parts]
        return self.returned(_columns(x.to(self.compute_dtype), weights, self.span))


class Row(single_device.RowLinear):
    """Local columns of the weight; the partial products are summed, and the bias is added once, after."""

    def __init__(self, source: single_device.RowLinear, span: Span):
        with torch.device("meta"):
            super().__init__(source.weight.size(1), source.out_features, source.bias is not None, source.compute_dtype)
        self.span, self.weight, self.bias = span, source.weight, source.bias

    def forward(self, x: Tensor) -> Tensor:
        partial = single_device.linear(x, self.weight, None, self.compute_dtype)
        out = operators.leave(partial, self.span.group, self.span.sequence_parallel)
        return out if self.bias is None else out + self.bias.to(self.compute_dtype)


class Embedding(single_device.TokenEmbedding):
    """Local rows of the vocabulary, zeros for the others, then g. `start`: the global id of the first local row."""

    def __init__(self, source: single_device.TokenEmbedding, span: Span, start: int):
        with torch.device("meta"):
            super().__init__(source.weight.size(0), source.hidden, source.compute_dtype)
        self.span, self.start, self.weight = span, start, source.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return operators.leave(self._own_rows(tokens), self.span.group, self.span.sequence_parallel)

    def _own_rows(self, tokens: Tensor) -> Tensor:
        num_rows = self.weight.size(0)
        if num_rows == 0:  # the sum over no rows keeps the parameter in the graph: its hooks must fire all the same
            zeros = self.weight.new_zeros((*tokens.shape, self.hidden), dtype=self.compute_dtype)
            return zeros + self.weight.sum().to(self.compute_dtype)
        elsewhere = (tokens < self.start) | (tokens >= self.start + num_rows)
        rows = functional.embedding((tokens - self.start).masked_fill(elsewhere, 0), self.weight)
        return rows.to(self.compute_dtype).masked_fill(elsewhere.unsqueeze(-1), 0)


class Position(single_device.PositionEmbedding):
    """Whole table; under sequence parallel each rank adds the positions of its own slice."""

    def __init__(self, source: single_device.PositionEmbedding, span: Span):
        with torch.device("meta"):
            super().__init__(source.seq, source.hidden, source.compute_dtype)
        self.span, self.weight = span, source.weight

    def forward(self, x: Tensor) -> Tensor:
        start = self.span.group.index * x.size(1) if self.span.sequence_parallel else 0
        return x + self.weight[start : start + x.size(1)].to(self.compute_dtype)


class Head(single_device.VocabHead):
    """Local rows of the vocabulary: logits stay split, `VocabParallelLoss` reads them so."""

    def __init__(self, source: single_device.VocabHead, span: Span):
        with torch.device("meta"):
            super().__init__(source.hidden, source.weight.size(0), source.compute_dtype)
        self.span, self.weight = span, source.weight

    def forward(self, x: Tensor) -> Tensor:
        return _columns(x.to(self.compute_dtype), [(self.weight, None)], self.span)[0]


class Enter(single_device.ExpertInput):
    """f as a node of its own: the router and the experts behind it read the whole sequence."""

    def __init__(self, source: single_device.ExpertInput, span: Span):
        super().__init__(source.compute_dtype)
        self.span = span

    def forward(self, x: Tensor) -> Tensor:
        return operators.enter(super().forward(x), self.span.group, self.span.sequence_parallel)


class Leave(single_device.ExpertOutput):
    """g: every rank has what its slices of the experts give."""

    def __init__(self, source: single_device.ExpertOutput, span: Span):
        super().__init__(source.compute_dtype)
        self.span = span

    def forward(self, x: Tensor, num_samples: int) -> Tensor:
        if self.span.sequence_parallel:
            return operators.leave(super().forward(x, num_samples), self.span.group, True)
        # Summed in place before it is looked at as samples: of a view, autograd would write the gradient twice.
        return super().forward(operators.leave(x, self.span.group, False), num_samples)


class Dropout(single_device.HashDropout):
    """The same mask as on one device: told where the slice that arrives begins, by what of it is missing."""

    def __init__(self, source: single_device.HashDropout, span: Span):
        super().__init__(source.rate, source.seed, source.site, source.hidden, source.compute_dtype)
        self.span = span

    def forward(self, x: Tensor) -> Tensor:
        group = self.span.group
        split_hidden = 0 < x.size(-1) < self.hidden  # between a column and a row layer: the whole sequence
        self.hidden_offset = group.index * x.size(-1) if split_hidden else 0
        self.sequence_offset = group.index * x.size(1) if self.span.sequence_parallel and not split_hidden else 0
        return super().forward(x)


class AttentionProduct(single_device.AttentionProduct):
    """Attention over local heads; dropped probabilities are those of the global heads."""

    def __init__(self, source: single_device.AttentionProduct, span: Span):
        super().__init__(source.rate, source.seed, source.site, source.compute_dtype, source.causal)
        self.span = span

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.head_offset = self.span.group.index * query.size(1)
        return super().forward(query, key, value)


def _columns(x: Tensor, weights: list[tuple[Tensor, Tensor | None]], span: Span) -> tuple[Tensor, ...]:
    return operators.columns(x, weights, span.group, span.sequence_parallel, span.overlap)


FORMS: dict[type, Any] = {
    single_device.ColumnLinear: Columns,
    single_device.RowLinear: Row,
    single_device.PositionEmbedding: Position,
    single_device.VocabHead: Head,
    single_device.ExpertInput: Enter,
    single_device.ExpertOutput: Leave,
    single_device.HashDropout: Dropout,
    single_device.AttentionProduct: AttentionProduct,
}
