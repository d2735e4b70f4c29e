"""zero1 at run time: gradients are reduce-scattered by chunks of each parameter, updated chunks gathered back.

A bucket is a buffer (copies, width): row r holds chunk r of every parameter in it, padded to equal length. After the
reduce-scatter a rank has its row summed; after the update the same buffer carries the new chunks to everyone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch import Tensor, nn

from parallelrun import comm
from parallelrun.layout import chunk_range
from parallelrun.mesh.runtime import Group, Mesh
from parallelrun.plan.structure import Plan
from parallelrun.train.parameters import HeldParameter, LocalParameter

from ..bucketed import Bucket, Reducer, Slot
from ..buckets import padded_numel, partition
from ..local import LocalRuntime, Pair, by_axis, frozen, match, set_gradient, trained
from ..sharding import shard_layout


def shard(parts: Sequence[nn.Module], plan: Plan, mesh: Mesh) -> None:
    """Nothing: every rank keeps the whole weights."""


def attach(parts: Sequence[nn.Module], plan: Plan, mesh: Mesh) -> LocalRuntime:
    """The DataRuntime over materialised weights."""
    pairs = match(parts, plan, mesh)
    return Zero1Runtime(pairs, plan, mesh.group) if mesh.group("dp").size > 1 else LocalRuntime(pairs)


@dataclass(frozen=True)
class Chunk:
    """One parameter's part in a bucket. rows: its region of the buffer, (copies, chunk, ...); mine: this rank's chunk
    of the weight, sharing its storage; gradient: that of `mine`, in the bucket's reduced row."""

    weight: nn.Parameter
    rows: Tensor
    mine: Tensor
    gradient: Tensor

    def pieces(self, whole: Tensor) -> list[tuple[Tensor, Tensor]]:
        """(region, slice of `whole`) pairs: the full chunks at once, then the shorter last one; padding is in none."""
        size = self.rows.shape[1]
        if size == 0:
            return []
        full, rest = divmod(whole.shape[0], size)
        out = [(self.rows[:full], whole[: full * size].unflatten(0, (full, size)))] if full else []
        return [*out, (self.rows[full, :rest], whole[full * size :])] if rest else out


class Zero1Runtime(LocalRuntime):
    """The optimizer updates this rank's chunks in place in the module's own weights, and what has no copies whole.

    group_of: the group of an axis.
    """

    def __init__(self, pairs: Sequence[Pair], plan: Plan, group_of: Callable[[str], Group]):
        super().__init__(frozen(pairs))
        pairs = trained(pairs)
        weights = [parameter for _, parameter in pairs]
        filled = partition([held for held, _ in pairs], [tuple(w.shape) for w in weights], plan, padded=True)
        self._chunks: list[list[Chunk]] = []
        self._groups = [group_of(bucket.axis) for bucket in filled]
        flat, buckets = [], []
        for bucket, group in zip(filled, self._groups):
            reduced, made = self._bucket([weights[i] for i in bucket.indices], group)
            flat.append((bucket.axis, reduced))
            buckets.append(made)
        self.flat_gradients = by_axis(flat)
        self._reducer = Reducer(buckets, plan)
        self._own = {id(chunk.weight): chunk for chunks in self._chunks for chunk in chunks}
        self._alone = [weight for weight in weights if id(weight) not in self._own]
        self.parameters = [chunk_parameter(held, self._mine(weight), plan) for held, weight in pairs]

    def _mine(self, weight: nn.Parameter) -> Tensor:
        return self._own[id(weight)].mine if id(weight) in self._own else weight

    def begin_step(self) -> None:
        """Gradients are empty and backward passes are counted."""
        for parameter in self.parameters:
            parameter.tensor.grad = None
        self._reducer.begin_step()

    def finish_gradients(self) -> None:
        """Every chunk's gradient is its part of the sum over the parameter's copies."""
        self._reducer.finish()
        for chunk in self._own.values():
            chunk.mine.grad = chunk.gradient
        for weight in self._alone:
            set_gradient(weight, weight.grad)

    @torch.no_grad()
    def finish_update(self) -> None:
        """Every rank's updated chunks are in everyone's weights."""
        works = []
        for bucket, group, chunks in zip(self._reducer.buckets, self._groups, self._chunks):
            row = bucket.buffer.view(group.size, -1)[group.index]
            for chunk in chunks:
                chunk.rows[group.index, : chunk.mine.shape[0]].copy_(chunk.mine)
            works.append(comm.all_gather_into(bucket.buffer, row, group, "parameters", async_op=True))
        for work, chunks in zip(works, self._chunks):
            work.wait()
            for chunk in chunks:
                for region, part in chunk.pieces(chunk.weight.detach()):
                    part.copy_(region)

    def _bucket(self, weights: Sequence[nn.Parameter], group: Group) -> tuple[Tensor, Bucket]:
        """(this rank's reduced row, the bucket) of weights that are summed over `group`."""
        size, index = group.size, group.index
        width = sum(padded_numel(weight.shape, size) for weight in weights) // size
        buffer = torch.zeros(size * width, dtype=weights[0].dtype, device=weights[0].device)
        reduced = torch.zeros(width, dtype=buffer.dtype, device=buffer.device)
        chunks, start = [], 0
        for weight in weights:
            rows = -(-weight.shape[0] // size)
            stop = start + rows * prod(weight.shape[1:])
            first, last = chunk_range(weight.shape[0], size, index)
            mine = weight.detach()[first:last]
            region = buffer.view(size, width)[:, start:stop].unflatten(1, (rows, *weight.shape[1:]))
            gradient = reduced[start : start + mine.numel()].view(mine.shape)
            chunks.append(Chunk(weight, region, mine, gradient))
            start = stop
        self._chunks.append(chunks)
        send = partial(comm.reduce_scatter_into, reduced, buffer, group, "gradients", async_op=True)
        return reduced, Bucket(buffer, [Slot(chunk.weight, chunk.pieces) for chunk in chunks], send)


def chunk_parameter(held: HeldParameter, mine: Tensor, plan: Plan) -> LocalParameter:
    """What the optimizer updates of a parameter: this rank's chunk, or all of what has no copies."""
    return LocalParameter(held.name, mine, held.spec, shard_layout(held.layout, plan), held.shared)
