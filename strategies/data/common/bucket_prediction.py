"""Predictions for strategies that reduce gradients in buckets: their contents, the memory that waits, the final sums.

The buckets themselves are those of `DataStrategy.buckets`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from parallelrun.base.errors import Problem
from parallelrun.base.layout import Layout
from parallelrun.planner.contract.parameters import HeldParameter, distinct_parameters, element_bytes, held_parameters
from parallelrun.planner.contract.plan import Collective, Plan
from parallelrun.planner.contract.request import Request

from .buckets import Shape, exchanged_numel, reduce_bytes


def check_shardable(request: Request, kind: str, frozen_too: bool = True) -> list[Problem]:
    """A parameter without dims has no dim 0 to shard. frozen_too: parameters that are not trained are sharded."""
    if request.num_data_ranks == 1:
        return []
    over = f"dp={request.dp}" if request.cp == 1 else f"dp x cp={request.num_data_ranks}"
    scalars = [p.name for p in request.spec.parameters.values() if not p.shape and (frozen_too or not p.frozen)]
    return [
        Problem(
            f"strategy.data.kind={kind} splits dim 0 of every parameter over {over}, but {name} has no dims",
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
    shapes: dict[tuple[Layout, Shape], Shape] = {}
    for parameter in held:
        key = parameter.layout, parameter.spec.shape
        if key not in shapes:
            shapes[key] = parameter.layout.local_shape(parameter.spec.shape, plan.mesh.sizes, coordinate)
    return [shapes[parameter.layout, parameter.spec.shape] for parameter in held]


def final_collectives(pp_rank: int, coordinate: dict[str, int], plan: Plan) -> list[Collective]:
    """The messages of `training.loop.gradients.Gradients.finalise`, after the data strategy is done.

    One all-reduce per set of partial axes (per axis of the set) and one over the embedding group.
    """
    tied = {name for pair in plan.tied_copies for name in pair}
    summed = [
        (p, count, plan.data.state_layout(p.spec, p.layout, plan))
        for p, count in distinct_parameters(plan, pp_rank)
        if not p.spec.frozen and (p.layout.partial or p.name in tied)
    ]
    numels = {
        p.name: (layout.partial, count * layout.local_numel(p.spec.shape, plan.mesh.sizes, coordinate))
        for p, count, layout in summed
    }
    out = []
    for axes in sorted({layout.partial for _, _, layout in summed} - {()}):
        payload = reduce_bytes(plan) * sum(numel for partial, numel in numels.values() if partial == axes)
        out += [Collective(axis, "all_reduce", "partial", 1, payload) for axis in axes if plan.mesh.size(axis) > 1]
    sizes = [numel for name, (_, numel) in numels.items() if name in tied]
    if sizes:
        out.append(Collective("embedding", "all_reduce", "tied", 1, reduce_bytes(plan) * sum(sizes)))
    return out


def buckets_of(pp_rank: int, coordinate: dict[str, int], plan: Plan) -> RankBuckets:
    """The buckets of a rank, which are computed once."""
    key = "buckets", pp_rank, *sorted(coordinate.items())
    if key not in plan.weights_cache:
        plan.weights_cache[key] = RankBuckets(pp_rank, coordinate, plan)
    buckets: RankBuckets = plan.weights_cache[key]
    return buckets


class RankBuckets:
    """The buckets of one rank, in launch order, and the gradients that wait during backward until theirs is full.

    element_bytes: by bucket, of an element of its weights.
    """

    def __init__(self, pp_rank: int, coordinate: dict[str, int], plan: Plan):
        self._plan, self._pp_rank = plan, pp_rank
        self._trained = trained_parameters(plan, pp_rank)
        self._shapes = local_shapes(self._trained, coordinate, plan)
        buckets = plan.data.buckets(self._trained, self._shapes, plan)
        self.axes = [bucket.axis for bucket in buckets]
        self.parts = [[(self._trained[i], self._shapes[i]) for i in bucket.indices] for bucket in buckets]
        self.element_bytes = [element_bytes(parts[0][0].spec, plan, parts[0][0].layout) for parts in self.parts]
        self._bucket_of = {index: number for number, bucket in enumerate(buckets) for index in bucket.indices}
        self._sent: dict[tuple[int, bool], int] = {}
        self._waiting: dict[int, list[tuple[int, list[int]]]] = {}

    def sent_bytes(self, number: int, padded: bool = True) -> int:
        """Bytes of bucket `number`, padded as ZeRO sends it or without padding."""
        if (number, padded) not in self._sent:
            numel = sum(exchanged_numel(held, shape, self._plan, padded) for held, shape in self.parts[number])
            self._sent[number, padded] = reduce_bytes(self._plan) * numel
        return self._sent[number, padded]

    def waiting(self, stage: int) -> list[tuple[int, list[int]]]:
        """Per block of a stage, in forward order, before its backward: (bytes outside the buckets, the full buckets).

        They are counted beside the buckets, which a rank always holds: backward leaves the gradient of a weight outside
        its bucket until the bucket's last gradient is there. The later stages of the rank have already run and left the
        gradients that fill no bucket.
        """
        if stage not in self._waiting:
            self._waiting[stage] = self._walk_to(stage)
        return self._waiting[stage]

    def _walk_to(self, stage: int) -> list[tuple[int, list[int]]]:
        plan = self._plan
        reader_of = {layer.tied: block.name for block in plan.spec.blocks for layer in block.layers if layer.tied}
        sizes = [element_bytes(p.spec, plan, p.layout) * prod(s) for p, s in zip(self._trained, self._shapes)]
        held: dict[tuple[int, str], list[int]] = {}  # indices by stage and block
        read: dict[str, list[int]] = {}  # indices of tied weights by the block that reads them
        for index, parameter in enumerate(self._trained):
            held.setdefault((parameter.stage, parameter.block), []).append(index)
            read.setdefault(reader_of.get(parameter.name, ""), []).append(index)
        missing, beside = [len(parts) for parts in self.parts], [0] * len(self.parts)
        full: list[int] = []
        outside = 0  # bytes in no full bucket, and of tied weights from the block that reads them to their own
        waiting: dict[str, tuple[int, list[int]]] = {}
        for own in sorted(plan.stages_of(self._pp_rank), key=lambda candidate: -candidate.index):
            for block in reversed(own.blocks):
                if own.index == stage:
                    waiting[block] = outside, [*full]
                outside += sum(sizes[index] for index in read.get(block, ()))
                for index in held.get((own.index, block), ()):
                    if index not in self._bucket_of:
                        continue
                    is_early = reader_of.get(self._trained[index].name) in own.blocks
                    outside += 0 if is_early else sizes[index]
                    bucket = self._bucket_of[index]
                    beside[bucket] += sizes[index]
                    missing[bucket] -= 1
                    if not missing[bucket]:
                        outside -= beside[bucket]
                        full.append(bucket)
        return [waiting[block] for block in plan.stages[stage].blocks]
