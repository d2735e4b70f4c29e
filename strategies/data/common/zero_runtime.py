"""The shared runtime of ZeRO stages 1 and 2: weights are cut into chunks, one for each copy, which sums and updates it.

A bucket is sent as a buffer (copies, width): row r holds chunk r of every weight in it, padded to equal lengths.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod

import torch
from torch import Tensor, nn

from parallelrun.base.layout import chunk_range
from parallelrun.distributed import comm
from parallelrun.distributed.comm import Waitable
from parallelrun.distributed.mesh import Group, Mesh
from parallelrun.planner.contract.parameters import HeldParameter
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.pieces.expert_axes import replica_axis
from parallelrun.training.loop.data_runtime import DataRuntime, Pair, by_axis, complete_gradients
from parallelrun.training.loop.flat_tensors import bucket_pairs

from .buckets import shard_dim
from .reducer import GradientBucket, Reducer


@dataclass(frozen=True)
class ChunkedWeight:
    """One weight and its chunks along `dim`. One without dims is a chunk of (1,) that each rank sums and updates.

    shape: of a chunk; along dim 0 it may be padded. mine: this rank's chunk, contiguous, in the stored dtype. It shares
    the weight's storage where it is contiguous there (`dim` 0, or one expert) and the weight is not rounded.
    """

    weight: nn.Parameter
    dim: int
    shape: tuple[int, ...]
    mine: Tensor

    @property
    def numel(self) -> int:
        """Elements of a chunk, padding included."""
        return prod(self.shape)

    def pieces(self, regions: Tensor, tensor: Tensor) -> list[tuple[Tensor, Tensor]]:
        """(part of `regions`, part of `tensor`) pairs: the full chunks at once, then the shorter last one.

        tensor: of the weight's shape. Padding is in no pair.
        """
        if not tensor.dim():
            return [(region[0], tensor) for region in regions]
        dim, size = self.dim, self.shape[self.dim]
        if size == 0:
            return []
        full, rest = divmod(tensor.shape[dim], size)
        chunks = tensor.narrow(dim, 0, full * size).unflatten(dim, (full, size))
        out = [(regions[:full].movedim(0, dim), chunks)] if full else []
        return [*out, (regions[full].narrow(dim, 0, rest), tensor.narrow(dim, full * size, rest))] if rest else out

    def padding(self, regions: Tensor) -> list[Tensor]:
        """The parts of `regions` that no element of the weight is in."""
        dim, size, lengths = self.dim, self.shape[self.dim], self.weight.shape or (len(regions),)
        full, rest = divmod(lengths[dim], size) if size else (len(regions), 0)
        behind = [regions[full].narrow(dim, rest, size - rest)] if rest else []
        return [part for part in (*behind, regions[full + bool(rest) :]) if part.numel()]

    def own(self, row: Tensor) -> Tensor:
        """The part of one chunk's `row` (numel,) that is no padding, in the shape and strides of `mine`."""
        return row[: self.mine.numel()].view(self.mine.shape)


def cut(parameter: HeldParameter, weight: nn.Parameter, group: Group, plan: Plan) -> ChunkedWeight:
    """Cut a weight that has copies on the ranks of `group`, and round it if the plan says so."""
    spec, layout = parameter.spec, parameter.layout
    dim = shard_dim(spec, layout, replica_axis(layout, plan), plan)
    shape, part = list(weight.shape) or [1], weight.detach()
    if weight.dim():
        shape[dim] = -(-shape[dim] // group.size)
        start, stop = chunk_range(weight.shape[dim], group.size, group.index)
        part = part.narrow(dim, start, stop - start)
    dtype = plan.data.weight_dtype(spec, layout, plan)
    if dtype != plan.precision.stored:
        part = part.clone(memory_format=torch.contiguous_format)
        weight.data = weight.data.to(getattr(torch, dtype))
    # Flat and back: torch's fused optimizers compare strides, those of dims of one element too.
    return ChunkedWeight(weight, dim, tuple(shape), part.contiguous().view(-1).view(part.shape))


class Chunks:
    """The chunks of one bucket's weights, which all have the same dtype.

    gradients: this rank's summed row; shards: its part for each weight. buffer: for all chunks of all weights; None:
    each exchange has a buffer of its own.
    """

    buffer: Tensor | None = None

    def __init__(self, weights: Sequence[ChunkedWeight], group: Group):
        self.weights, self.group = list(weights), group
        self._starts = [0, *accumulate(chunk.numel for chunk in weights)]
        self.gradients = weights[0].mine.new_zeros(self._starts[-1])
        self.shards = self._own_parts(self.gradients)

    def new_buffer(self, dtype: torch.dtype | None = None) -> Tensor:
        """A buffer (flat) for all chunks of all weights, filled with zeros. dtype: the default is that of gradients."""
        return self.gradients.new_zeros(self.group.size * self.gradients.numel(), dtype=dtype)

    def regions(self, buffer: Tensor) -> list[Tensor]:
        """Each weight's chunks in a buffer: (copies, *shape of a chunk)."""
        rows = buffer.view(self.group.size, -1).split([chunk.numel for chunk in self.weights], dim=1)
        return [row.unflatten(1, chunk.shape) for row, chunk in zip(rows, self.weights)]

    def reduce(self, into: Tensor, buffer: Tensor) -> Waitable:
        """Start summing this rank's row of everyone's buffer into `into`."""
        return comm.reduce_scatter_into(into, buffer, self.group, "gradients", async_op=True)

    def gather(self) -> Callable[[], None]:
        """Start sharing this rank's updated chunks; the result waits and copies all chunks into the weights."""
        dtype, own = self.weights[0].weight.dtype, self.buffer
        buffer = self.new_buffer(dtype) if own is None else own.view(dtype)[: own.numel()]
        row = buffer.view(self.group.size, -1)[self.group.index]
        for part, chunk in zip(self._own_parts(row), self.weights):
            part.copy_(chunk.mine)
        work = comm.all_gather_into(buffer, row, self.group, "parameters", async_op=True)

        def finish() -> None:
            work.wait()
            for chunk, regions in zip(self.weights, self.regions(buffer)):
                for region, part in chunk.pieces(regions, chunk.weight.detach()):
                    part.copy_(region)
            if own is not None and own.dtype != dtype:
                self._clear_padding(own)

        return finish

    def _clear_padding(self, buffer: Tensor) -> None:
        """Rounded weights lay elsewhere in the buffer than gradients, whose padding must be zero when it is summed."""
        for chunk, regions in zip(self.weights, self.regions(buffer)):
            for part in chunk.padding(regions):
                part.zero_()

    def _own_parts(self, row: Tensor) -> list[Tensor]:
        parts = row.split([chunk.numel for chunk in self.weights])
        return [chunk.own(part) for chunk, part in zip(self.weights, parts)]


class PendingExchanges:
    """Exchanges that have been started, at most `limit` at a time, so that no more of their buffers exist."""

    def __init__(self, limit: int | None):
        self._limit, self._finish = limit, deque[Callable[[], None]]()

    def start(self, start: Callable[[], Callable[[], None]]) -> None:
        """Call `start`, which returns what waits for the exchange. At the limit, first wait for the oldest."""
        if len(self._finish) == self._limit:
            self._finish.popleft()()
        self._finish.append(start())

    def wait(self) -> None:
        """Wait for all of them."""
        while self._finish:
            self._finish.popleft()()


class ZeRORuntime(DataRuntime):
    """The optimizer updates this rank's chunks, and all of a weight without copies. max_pending: exchanges at once."""

    max_pending: int | None = None

    def __init__(self, pairs: Sequence[Pair], plan: Plan, mesh: Mesh):
        super().__init__(pairs, plan, mesh)
        buckets, unique = bucket_pairs(pairs, plan)
        self.pending = PendingExchanges(self.max_pending)
        self._chunks = [self._cut(own, mesh.group(axis)) for axis, own in buckets]
        self._buckets = [self.bucket(chunks) for chunks in self._chunks]
        self._reducers = [Reducer(own, plan) for own in self.orders([own[0][0].stage for _, own in buckets])]
        mine = {id(chunk.weight): chunk.mine for chunks in self._chunks for chunk in chunks.weights}
        self._unique = [weight for _, weight in unique]
        self.parameters = [
            replace(p, tensor=mine.get(id(p.tensor), p.tensor), layout=plan.data.state_layout(p.spec, p.layout, plan))
            for p in self.parameters
        ]
        self.flat_gradients = by_axis((axis, chunks.gradients) for (axis, _), chunks in zip(buckets, self._chunks))

    @abstractmethod
    def bucket(self, chunks: Chunks) -> GradientBucket:
        """Return the bucket that reduces the gradients of some chunks."""

    def orders(self, stages: Sequence[int]) -> Iterable[list[GradientBucket]]:
        """The buckets in groups, each of which is launched in its order. stages: of each bucket."""
        return [self._buckets]

    def begin_step(self) -> None:
        for parameter in self.parameters:
            parameter.tensor.grad = None
        for reducer in self._reducers:
            reducer.begin_step()

    def finish_gradients(self) -> None:
        """Make every chunk's gradient its part of the sum over the parameter's copies."""
        for reducer in self._reducers:
            reducer.finish()
        for chunks in self._chunks:
            for chunk, gradient in zip(chunks.weights, chunks.shards):
                chunk.mine.grad = gradient
        complete_gradients(self._unique)

    @torch.no_grad()
    def finish_update(self) -> None:
        """Copy every rank's updated chunks into all ranks' weights."""
        for chunks in self._chunks:
            self.pending.start(chunks.gather)
        self.pending.wait()

    def _cut(self, pairs: Sequence[Pair], group: Group) -> Chunks:
        return Chunks([cut(*pair, group, self._plan) for pair in pairs], group)
