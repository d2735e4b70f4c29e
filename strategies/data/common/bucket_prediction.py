"""Predictions for strategies that reduce gradients in buckets: their contents, the memory that waits, the final sums.

Torch-free. The buckets themselves are those of `DataStrategy.buckets`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from parallelrun.errors import Problem
from parallelrun.layout import Layout
from parallelrun.plan.parameters import HeldParameter, held_parameters
from parallelrun.plan.request import Request
from parallelrun.plan.structure import Collective, Plan
from parallelrun.precision import BYTES

from .buckets import Shape, exchanged_numel, reduce_bytes


def check_shardable(request: Request, kind: str, frozen_too: bool = True) -> list[Problem]:
    """A parameter without dims has no dim 0 to shard. frozen_too: parameters that are not trained are sharded."""
    if request.dp == 1:
        return []
    scalars = [p.name for p in request.spec.parameters.values() if not p.shape and (frozen_too or not p.frozen)]
    return [
        Problem(
            f"strategy.data.kind={kind} splits dim 0 of every parameter over dp={request.dp}, but {name} has no dims",
            where="strategy.data.kind",
            suggestion="strategy.data.kind=ddp, or give the parameter the shape (1,)",
            kind="not_built",
        )
        for name in scalars[:1]
    ]


def trained_parameters(plan: Plan, pp_rank: int) -> list[HeldParameter]:
    """The parameters of a pp rank that the optimizer updates."""
    return [parameter for parameter in held_parameters(plan, pp_rank) if not parameter.spec.frozen]


def local_shapes(held: Sequence[HeldParameter], coordinate: dict[str, int], plan: Plan) -> list[Shape]:
    """Shapes of the parameters before the data strategy shards them: split by the tensor axes and ep only."""
    known: dict[tuple[Layout, Shape], Shape] = {}
    for parameter in held:
        key = parameter.layout, parameter.spec.shape
        if key not in known:
            known[key] = parameter.layout.local_shape(parameter.spec.shape, plan.mesh.sizes, coordinate)
    return [known[parameter.layout, parameter.spec.shape] for parameter in held]


def final_collectives(pp_rank: int, coordinate: dict[str, int], plan: Plan) -> list[Collective]:
    """The messages of `train.gradients.Gradients.finalise`, after the data strategy is done.

    One all-reduce per set of partial axes (per axis of the set) and one over the embedding group.
    """
    tied = {name for pair in plan.tied_copies for name in pair}
    layouts = [
        (p, plan.data.state_layout(p.spec, p.layout, plan))
        for p in trained_parameters(plan, pp_rank)
        if p.layout.partial or p.name in tied
    ]
    numels = {p.name: layout.local_numel(p.spec.shape, plan.mesh.sizes, coordinate) for p, layout in layouts}
    out = []
    for axes in sorted({layout.partial for _, layout in layouts} - {()}):
        payload = reduce_bytes(plan) * sum(numels[p.name] for p, layout in layouts if layout.partial == axes)
        out += [Collective(axis, "all_reduce", "partial", 1, payload) for axis in axes if plan.mesh.size(axis) > 1]
    sizes = [numel for name, numel in numels.items() if name in tied]
    if sizes:
        out.append(Collective("embedding", "all_reduce", "tied", 1, reduce_bytes(plan) * sum(sizes)))
    return out


def buckets_of(pp_rank: int, coordinate: dict[str, int], plan: Plan) -> RankBuckets:
    """The buckets of a rank, which are computed once."""
    key = "buckets", pp_rank, *sorted(coordinate.items())
    if key not in plan.cache:
        plan.cache[key] = RankBuckets(pp_rank, coordinate, plan)
    found: RankBuckets = plan.cache[key]
    return found


class RankBuckets:
    """The buckets of one rank, in launch order, and the gradients that wait during backward until theirs is full."""

    def __init__(self, pp_rank: int, coordinate: dict[str, int], plan: Plan):
        self._plan, self._pp_rank = plan, pp_rank
        self._trained = trained_parameters(plan, pp_rank)
        self._shapes = local_shapes(self._trained, coordinate, plan)
        found = plan.data.buckets(self._trained, self._shapes, plan)
        self.axes = [bucket.axis for bucket in found]
        self.parts = [[(self._trained[i], self._shapes[i]) for i in bucket.indices] for bucket in found]
        self._bucket_of = {index: number for number, one in enumerate(found) for index in one.indices}

    def sent_bytes(self, number: int, padded: bool = True) -> int:
        """Bytes of bucket `number`, padded as ZeRO sends it or without padding."""
        numel = sum(exchanged_numel(held, shape, self._plan, padded) for held, shape in self.parts[number])
        return reduce_bytes(self._plan) * numel

    def waiting(self, stage: int) -> list[tuple[int, list[int]]]:
        """Per block of a stage, in forward order, before its backward: (bytes outside the buckets, the full buckets).

        They are counted beside the buckets, which a rank always holds: backward leaves the gradient of a weight outside
        its bucket until the bucket's last gradient is there. The later stages of the rank have already run and left the
        gradients that fill no bucket.
        """
        plan, each = self._plan, BYTES[self._plan.precision.stored]
        reader_of = {layer.tied: block.name for block in plan.spec.blocks for layer in block.layers if layer.tied}
        missing = [len(parts) for parts in self.parts]
        beside = [0] * len(self.parts)
        full: list[int] = []
        early = 0  # of tied weights, from the block that reads them to the one that holds them
        found: dict[str, tuple[int, list[int]]] = {}
        for own in sorted(plan.stages_of(self._pp_rank), key=lambda one: -one.index):
            for block in reversed(own.blocks):
                if own.index == stage:
                    found[block] = sum(beside) + early, [*full]
                for index, held in enumerate(self._trained):
                    size, reader = each * prod(self._shapes[index]), reader_of.get(held.name)
                    if reader == block and reader in own.blocks:
                        early += size
                    if held.stage != own.index or held.block != block or index not in self._bucket_of:
                        continue
                    early -= size if reader in own.blocks else 0
                    bucket = self._bucket_of[index]
                    beside[bucket] += size
                    missing[bucket] -= 1
                    if not missing[bucket]:
                        beside[bucket] = 0
                        full.append(bucket)
        return [found[block] for block in plan.stages[stage].blocks]
