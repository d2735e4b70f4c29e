"""Role layers on the ranks of a tensor axis. Each takes over the (already cut) parameters of the layer it replaces."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional

from parallelrun.models import float8
from parallelrun.models import layers as single_device
from parallelrun.models.autograd import apply
from parallelrun.models.functions import cast, linear
from parallelrun.models.masked_layers import AttentionProduct, HashDropout
from parallelrun.models.vision.convolution import ColumnConvolution, RowConvolution

from ..common.sharding import TakesOver
from .operators import (
    OverlappedColumnConvolution,
    TPContext,
    column_parallel_linear,
    copy_or_gather,
    reduce_or_scatter,
)


class TensorParallelLayer(TakesOver):
    """A layer on the ranks of `tp`."""

    tp: TPContext


class ColumnParallelLinear(TensorParallelLayer, single_device.ColumnLinear):
    """Local rows of every output's weight. Only under sequence parallelism does forward communicate."""

    def forward(self, x: Tensor) -> Any:
        pairs = [*map(self.weights, self.outputs)]
        return self.returned(column_parallel_linear(cast(x, self.compute_dtype), pairs, self.tp, self.float8))


class RowParallelLinear(TensorParallelLayer, single_device.RowLinear):
    """Local columns of the weight; the partial products are summed, and the bias is added once, after."""

    def forward(self, x: Tensor) -> Tensor:
        out = reduce_or_scatter(
            float8.multiply(x, [(self.weight, None)], self.compute_dtype, self.float8)[0]
            if self.float8
            else linear(x, self.weight, None, self.compute_dtype),
            self.tp,
        )
        return out if self.bias is None else out + cast(self.bias, self.compute_dtype)


class ColumnParallelConvolution(TensorParallelLayer, ColumnConvolution):
    """Local output channels."""

    def forward(self, x: Tensor) -> Tensor:
        x = cast(x, self.compute_dtype)
        if self.tp.overlap:
            window = self.stride, self.padding
            return apply(OverlappedColumnConvolution, x, self.tp.group, *window, self.weight, self.bias)
        return super().forward(copy_or_gather(x, self.tp))


class RowParallelConvolution(TensorParallelLayer, RowConvolution):
    """Local input channels; the partial results are summed, and the bias is added once, after."""

    def forward(self, x: Tensor) -> Tensor:
        out = reduce_or_scatter(self.convolve(x, None), self.tp)
        return out if self.bias is None else out.add_(cast(self.bias, self.compute_dtype).view(-1, 1, 1))


class VocabParallelEmbedding(TensorParallelLayer, single_device.TokenEmbedding):
    """Local rows of the vocabulary and zeros for the others, summed. start: the global id of the first local row."""

    start: int

    def forward(self, tokens: Tensor) -> Tensor:
        return reduce_or_scatter(self._own_rows(tokens), self.tp)

    def _own_rows(self, tokens: Tensor) -> Tensor:
        num_rows = self.weight.size(0)
        if num_rows == 0:  # the sum over no rows keeps the parameter in the graph: its hooks must fire all the same
            zeros = self.weight.new_zeros((*tokens.shape, self.hidden), dtype=self.compute_dtype)
            return zeros + self.weight.sum().to(self.compute_dtype)
        elsewhere = (tokens < self.start) | (tokens >= self.start + num_rows)
        rows = functional.embedding((tokens - self.start).masked_fill(elsewhere, 0), self.weight)
        return rows.to(self.compute_dtype).masked_fill(elsewhere.unsqueeze(-1), 0)


class SequencePositionEmbedding(TensorParallelLayer, single_device.PositionEmbedding):
    """The whole table; under sequence parallelism each rank adds the positions of its own slice."""

    def forward(self, x: Tensor) -> Tensor:
        start = self.start + (self.tp.group.index * x.size(1) if self.tp.sequence_parallel else 0)
        return x + self.rows(x.size(1), start)


class VocabParallelHead(TensorParallelLayer, single_device.VocabHead):
    """Local rows of the vocabulary: logits stay split, as `VocabParallelLoss` reads them."""

    def forward(self, x: Tensor) -> Tensor:
        if self.defers:
            return x
        return column_parallel_linear(cast(x, self.compute_dtype), [(self.weight, self.bias)], self.tp)[0]

    def gathered(self, x: Tensor) -> Tensor:
        return copy_or_gather(super().gathered(x), self.tp)


class ParallelSharedInput(TensorParallelLayer, single_device.SharedInput):
    """copy_to_tp as a node of its own: what is behind it reads the whole sequence."""

    def forward(self, x: Tensor) -> Tensor:
        return copy_or_gather(super().forward(x), self.tp)


class ParallelExpertOutput(TensorParallelLayer, single_device.ExpertOutput):
    """reduce_from_tp: every rank adds what its slices of the experts give."""

    def forward(self, x: Tensor, num_samples: int) -> Tensor:
        if self.tp.sequence_parallel:
            return reduce_or_scatter(super().forward(x, num_samples), self.tp)
        # Summed in place before it is viewed as samples: of a view, autograd would write the gradient twice.
        return super().forward(reduce_or_scatter(x, self.tp), num_samples)


class SliceDropout(TensorParallelLayer, HashDropout):
    """The same mask as on one device: where the slice begins follows from which dim of it is shorter."""

    def forward(self, x: Tensor) -> Tensor:
        if not (self.rate and self.active):
            return x
        index = self.tp.group.index
        split_hidden = 0 < x.size(-1) < self.hidden  # between a column and a row layer: the whole sequence
        self.hidden_offset = index * x.size(-1) if split_hidden else 0
        self.sequence_offset = index * x.size(1) if self.tp.sequence_parallel and not split_hidden else 0
        return super().forward(x)


class HeadParallelAttention(TensorParallelLayer, AttentionProduct):
    """Attention over local heads; dropped probabilities are those of the global heads."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.rate and self.active:
            self.head_offset = self.tp.group.index * query.size(1)
        return super().forward(query, key, value)


PARALLEL_LAYERS: dict[type, type[TensorParallelLayer]] = {
    single_device.ColumnLinear: ColumnParallelLinear,
    single_device.RowLinear: RowParallelLinear,
    ColumnConvolution: ColumnParallelConvolution,
    RowConvolution: RowParallelConvolution,
    single_device.PositionEmbedding: SequencePositionEmbedding,
    single_device.VocabHead: VocabParallelHead,
    single_device.SharedInput: ParallelSharedInput,
    single_device.ExpertInput: ParallelSharedInput,
    single_device.ExpertOutput: ParallelExpertOutput,
    HashDropout: SliceDropout,
    AttentionProduct: HeadParallelAttention,
}
