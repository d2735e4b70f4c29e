"""zero1 at run time: gradients are reduce-scattered by chunks of each parameter, updated chunks gathered back.

A bucket is a buffer (copies, width): row r holds chunk r of every parameter in it, padded to equal length. After the
reduce-scatter a rank has its row summed; after the update the same buffer carries the new chunks to everyone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from parallelrun import comm
from parallelrun.mesh import Group, Mesh
from parallelrun.plan.structure import Plan
from parallelrun.train.data_runtime import DataRuntime, Pair, by_axis, set_gradient, trained

from ..bucketed import Bucket, Reducer, Slot
from ..buckets import partition
from ..chunks import Cut, cut, local_parameter, starts_of


@dataclass(frozen=True)
class Chunk:
    """One parameter's part in a bucket. regions: where its chunks lie in the buffer, (copies, *shape of a chunk);
    gradient: that of this rank's chunk, in the bucket's reduced row."""

    cut: Cut
    regions: Tensor
    gradient: Tensor

    def pieces(self, whole: Tensor) -> list[tuple[Tensor, Tensor]]:
        """`Cut.pieces` of this bucket's buffer."""
        return self.cut.pieces(self.regions, whole)


class ZeRO1Runtime(DataRuntime):
    """The optimizer updates this rank's chunks in place in the module's own weights, and what has no copies whole."""

    def __init__(self, pairs: Sequence[Pair], plan: Plan, mesh: Mesh):
        super().__init__(pairs, plan, mesh)
        pairs = trained(pairs)
        shapes = [tuple(weight.shape) for _, weight in pairs]
        filled = partition([held for held, _ in pairs], shapes, plan, padded=True)
        self._chunks: list[list[Chunk]] = []
        self._groups = [mesh.group(bucket.axis) for bucket in filled]
        flat, buckets = [], []
        for bucket, group in zip(filled, self._groups):
            reduced, made = self._bucket([cut(*pairs[i], group, plan) for i in bucket.indices], group)
            flat.append((bucket.axis, reduced))
            buckets.append(made)
        self.flat_gradients = by_axis(flat)
        self._reducer = Reducer(buckets, plan)
        self._own = [chunk for chunks in self._chunks for chunk in chunks]
        mine: dict[int, Tensor] = {id(chunk.cut.weight): chunk.cut.mine for chunk in self._own}
        self._alone = [weight for _, weight in pairs if id(weight) not in mine]
        self.parameters = [local_parameter(held, mine.get(id(weight), weight), plan) for held, weight in pairs]

    def begin_step(self) -> None:
        """Gradients are empty and backward passes are counted."""
        for parameter in self.parameters:
            parameter.tensor.grad = None
        self._reducer.begin_step()

    def finish_gradients(self) -> None:
        """Every chunk's gradient is its part of the sum over the parameter's copies."""
        self._reducer.finish()
        for chunk in self._own:
            chunk.cut.mine.grad = chunk.gradient
        for weight in self._alone:
            set_gradient(weight, weight.grad)

    @torch.no_grad()
    def finish_update(self) -> None:
        """Every rank's updated chunks are in everyone's weights."""
        works = []
        for bucket, group, chunks in zip(self._reducer.buckets, self._groups, self._chunks):
            row = bucket.buffer.view(group.size, -1)[group.index]
            for chunk in chunks:
                chunk.cut.own(chunk.regions[group.index].view(-1)).copy_(chunk.cut.mine)
            works.append(comm.all_gather_into(bucket.buffer, row, group, "parameters", async_op=True))
        for work, chunks in zip(works, self._chunks):
            assert work is not None
            work.wait()
            for chunk in chunks:
                for region, part in chunk.pieces(chunk.cut.weight.detach()):
                    part.copy_(region)

    def _bucket(self, cuts: Sequence[Cut], group: Group) -> tuple[Tensor, Bucket]:
        """(this rank's reduced row, the bucket) of weights that are summed over `group`."""
        starts = starts_of(cuts)
        buffer = cuts[0].mine.new_zeros(group.size * starts[-1])
        reduced = buffer.new_zeros(starts[-1])
        rows = buffer.view(group.size, -1)
        chunks = [
            Chunk(one, one.regions(rows[:, start:stop]), one.own(reduced[start:stop]))
            for one, start, stop in zip(cuts, starts, starts[1:])
        ]
        self._chunks.append(chunks)
        send = partial(comm.reduce_scatter_into, reduced, buffer, group, "gradients", async_op=True)
        return reduced, Bucket(buffer, [Slot(chunk.cut.weight, chunk.pieces) for chunk in chunks], send)


RUNTIME = ZeRO1Runtime
