"""zero1 at run time: gradients are reduce-scattered by chunks of each parameter, updated chunks gathered back.

A bucket is a buffer (dp, width): row r holds chunk r of every parameter in it, padded to equal length. After the
reduce-scatter a rank has its row summed; after the update the same buffer carries the new chunks to everyone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch import Tensor, nn

from parallelrun import comm
from parallelrun.layout import chunk_range
from parallelrun.mesh.runtime import Group, Mesh
from parallelrun.plan.structure import Plan
from parallelrun.train.parameters import LocalParameter

from ..bucketed import Bucket, Reducer, Slot
from ..buckets import fill, padded_numel, reduce_bytes
from ..local import LocalRuntime, Pair, frozen, match, trained


def shard(parts: Sequence[nn.Module], plan: Plan, mesh: Mesh) -> None:
    """Nothing: every rank keeps the whole weights."""


def attach(parts: Sequence[nn.Module], plan: Plan, mesh: Mesh) -> LocalRuntime:
    """The DataRuntime over materialised weights."""
    pairs = match(parts, plan, mesh)
    return Zero1Runtime(pairs, plan, mesh.group("dp")) if mesh.group("dp").size > 1 else LocalRuntime(pairs)


@dataclass(frozen=True)
class Chunk:
    """One parameter's part in a bucket. rows: its region of the buffer, (dp, chunk, ...); mine: this rank's chunk of
    the weight, sharing its storage; gradient: that of `mine`, in the bucket's reduced row."""

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
    """The optimizer updates this rank's chunks in place in the module's own weights."""

    def __init__(self, pairs: Sequence[Pair], plan: Plan, group: Group):
        super().__init__(frozen(pairs))
        self._group = group
        pairs = trained(pairs)
        weights = [parameter for _, parameter in pairs]
        numels = [padded_numel(weight.shape, group.size) for weight in weights]
        filled = fill([numel * reduce_bytes(plan) for numel in numels], plan.data.bucket_bytes)
        self._chunks: list[list[Chunk]] = []
        self.flat_gradients: list[Tensor] = []
        self._reducer = Reducer([self._bucket([weights[i] for i in bucket]) for bucket in filled], plan)
        chunk_of = {id(chunk.weight): chunk for chunks in self._chunks for chunk in chunks}
        self._own = [chunk_of[id(weight)] for weight in weights]
        self.parameters = [
            LocalParameter(held.name, chunk.mine, held.spec, held.layout.split(0, "dp"), held.shared)
            for (held, _), chunk in zip(pairs, self._own)
        ]

    def begin_step(self) -> None:
        """Gradients are empty and backward passes are counted."""
        for chunk in self._own:
            chunk.mine.grad = None
        self._reducer.begin_step()

    def finish_gradients(self) -> None:
        """Every chunk's gradient is its part of the sum over dp."""
        self._reducer.finish()
        for chunk in self._own:
            chunk.mine.grad = chunk.gradient

    @torch.no_grad()
    def finish_update(self) -> None:
        """Every rank's updated chunks are in everyone's weights."""
        works = []
        for bucket, chunks in zip(self._reducer.buckets, self._chunks):
            row = bucket.buffer.view(self._group.size, -1)[self._group.index]
            for chunk in chunks:
                chunk.rows[self._group.index, : chunk.mine.shape[0]].copy_(chunk.mine)
            works.append(comm.all_gather_into(bucket.buffer, row, self._group, "parameters", async_op=True))
        for work, chunks in zip(works, self._chunks):
            work.wait()
            for chunk in chunks:
                for region, part in chunk.pieces(chunk.weight.detach()):
                    part.copy_(region)

    def _bucket(self, weights: Sequence[nn.Parameter]) -> Bucket:
        size, index = self._group.size, self._group.index
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
        self.flat_gradients.append(reduced)
        send = partial(comm.reduce_scatter_into, reduced, buffer, self._group, "gradients", async_op=True)
        return Bucket(buffer, [Slot(chunk.weight, chunk.pieces) for chunk in chunks], send)
