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
class TPContext:
    """What a layer must know of the tensor axis: its group, how activations lie between blocks, and whether the
    input-gradient reduction may share a node with the weight gradients (never under zero bubble)."""

    group: Group
    sequence_parallel: bool
    overlap: bool


class ColumnParallelLinear(single_device.ColumnLinear):
    """Local rows of every output: one f for all of them, no communication forward unless sequence parallel."""

    def __init__(self, source: single_device.ColumnLinear, tp: TPContext):
        parts = {name: source.get_submodule(name) for name in source.outputs}
        sizes = {name: part.get_parameter("weight").size(0) for name, part in parts.items()}
        with torch.device("meta"):
            super().__init__(source.in_features, sizes, source.has_bias, source.compute_dtype)
        self.tp = tp
        for name, part in parts.items():
            self.hold(name, part)

    def forward(self, x: Tensor) -> Any:
        parts: list[Any] = [getattr(self, name) if name else self for name in self.outputs]
        weights = [(part.weight, part.bias) for part in parts]
        return self.give(_columns(x.to(self.compute_dtype), weights, self.tp))


class RowParallelLinear(single_device.RowLinear):
    """Local columns of the weight; the partial products are summed, and the bias is added once, after."""

    def __init__(self, source: single_device.RowLinear, tp: TPContext):
        with torch.device("meta"):
            super().__init__(source.weight.size(1), source.out_features, source.bias is not None, source.compute_dtype)
        self.tp, self.weight, self.bias = tp, source.weight, source.bias

    def forward(self, x: Tensor) -> Tensor:
        partial = single_device.linear(x, self.weight, None, self.compute_dtype)
        out = operators.reduce_or_scatter(partial, self.tp.group, self.tp.sequence_parallel)
        return out if self.bias is None else out + self.bias.to(self.compute_dtype)


class VocabParallelEmbedding(single_device.TokenEmbedding):
    """Local rows of the vocabulary, zeros for the others, then g. `start`: the global id of the first local row."""

    def __init__(self, source: single_device.TokenEmbedding, tp: TPContext, start: int):
        with torch.device("meta"):
            super().__init__(source.weight.size(0), source.hidden, source.compute_dtype)
        self.tp, self.start, self.weight = tp, start, source.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return operators.reduce_or_scatter(self._own_rows(tokens), self.tp.group, self.tp.sequence_parallel)

    def _own_rows(self, tokens: Tensor) -> Tensor:
        num_rows = self.weight.size(0)
        if num_rows == 0:  # the sum over no rows keeps the parameter in the graph: its hooks must fire all the same
            zeros = self.weight.new_zeros((*tokens.shape, self.hidden), dtype=self.compute_dtype)
            return zeros + self.weight.sum().to(self.compute_dtype)
        elsewhere = (tokens < self.start) | (tokens >= self.start + num_rows)
        rows = functional.embedding((tokens - self.start).masked_fill(elsewhere, 0), self.weight)
        return rows.to(self.compute_dtype).masked_fill(elsewhere.unsqueeze(-1), 0)


class SequencePositionEmbedding(single_device.PositionEmbedding):
    """Whole table; under sequence parallel each rank adds the positions of its own slice."""

    def __init__(self, source: single_device.PositionEmbedding, tp: TPContext):
        with torch.device("meta"):
            super().__init__(source.seq, source.hidden, source.compute_dtype)
        self.tp, self.weight = tp, source.weight

    def forward(self, x: Tensor) -> Tensor:
        start = self.tp.group.index * x.size(1) if self.tp.sequence_parallel else 0
        return x + self.weight[start : start + x.size(1)].to(self.compute_dtype)


class VocabParallelHead(single_device.VocabHead):
    """Local rows of the vocabulary: logits stay split, `VocabParallelLoss` reads them so."""

    def __init__(self, source: single_device.VocabHead, tp: TPContext):
        with torch.device("meta"):
            super().__init__(source.hidden, source.weight.size(0), source.compute_dtype)
        self.tp, self.weight = tp, source.weight

    def forward(self, x: Tensor) -> Tensor:
        return _columns(x.to(self.compute_dtype), [(self.weight, None)], self.tp)[0]


class ParallelExpertInput(single_device.ExpertInput):
    """f as a node of its own: the router and the experts behind it read the whole sequence."""

    def __init__(self, source: single_device.ExpertInput, tp: TPContext):
        super().__init__(source.compute_dtype)
        self.tp = tp

    def forward(self, x: Tensor) -> Tensor:
        return operators.copy_or_gather(super().forward(x), self.tp.group, self.tp.sequence_parallel)


class ParallelExpertOutput(single_device.ExpertOutput):
    """g: every rank has what its slices of the experts give."""

    def __init__(self, source: single_device.ExpertOutput, tp: TPContext):
        super().__init__(source.compute_dtype)
        self.tp = tp

    def forward(self, x: Tensor, num_samples: int) -> Tensor:
        if self.tp.sequence_parallel:
            return operators.reduce_or_scatter(super().forward(x, num_samples), self.tp.group, True)
        # Summed in place before it is looked at as samples: of a view, autograd would write the gradient twice.
        return super().forward(operators.reduce_or_scatter(x, self.tp.group, False), num_samples)


class SliceDropout(single_device.HashDropout):
    """The same mask as on one device: told where the slice that arrives begins, by what of it is missing."""

    def __init__(self, source: single_device.HashDropout, tp: TPContext):
        super().__init__(source.rate, source.seed, source.site, source.hidden, source.compute_dtype)
        self.tp = tp

    def forward(self, x: Tensor) -> Tensor:
        group = self.tp.group
        split_hidden = 0 < x.size(-1) < self.hidden  # between a column and a row layer: the whole sequence
        self.hidden_offset = group.index * x.size(-1) if split_hidden else 0
        self.sequence_offset = group.index * x.size(1) if self.tp.sequence_parallel and not split_hidden else 0
        return super().forward(x)


class HeadParallelAttention(single_device.AttentionProduct):
    """Attention over local heads; dropped probabilities are those of the global heads."""

    def __init__(self, source: single_device.AttentionProduct, tp: TPContext):
        super().__init__(source.rate, source.seed, source.site, source.compute_dtype, source.causal)
        self.tp = tp

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.head_offset = self.tp.group.index * query.size(1)
        return super().forward(query, key, value)


def _columns(x: Tensor, weights: list[tuple[Tensor, Tensor | None]], tp: TPContext) -> tuple[Tensor, ...]:
    return operators.column_parallel_linear(x, weights, tp.group, tp.sequence_parallel, tp.overlap)


PARALLEL_LAYERS: dict[type, Any] = {
    single_device.ColumnLinear: ColumnParallelLinear,
    single_device.RowLinear: RowParallelLinear,
    single_device.PositionEmbedding: SequencePositionEmbedding,
    single_device.VocabHead: VocabParallelHead,
    single_device.ExpertInput: ParallelExpertInput,
    single_device.ExpertOutput: ParallelExpertOutput,
    single_device.HashDropout: SliceDropout,
    single_device.AttentionProduct: HeadParallelAttention,
}
