"""Predictions for strategies that reduce gradients in buckets: contents, memory during backward, the final sums."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import cache
from math import prod

from parallelrun.base.layout import Layout
from parallelrun.planner.contract.collective import Collective
from parallelrun.planner.contract.parameters import HeldParameter, distinct_parameters, element_bytes, held_parameters
from parallelrun.planner.contract.plan import Plan, once
from parallelrun.planner.pieces.expert_axes import inner_axis

from .buckets import Shape, exchanged_numel, reduce_bytes


def trained_parameters(plan: Plan, pp_rank: int) -> list[HeldParameter]:
    """The parameters of a pp rank that the optimizer updates."""
    return [parameter for parameter in held_parameters(plan, pp_rank) if not parameter.spec.frozen]


def local_shapes(parameters: Sequence[HeldParameter], coordinate: dict[str, int], plan: Plan) -> list[Shape]:
    """Shapes of the parameters before the data strategy shards them: split by the tensor axes and ep only."""

    @cache  # equal blocks have equal parameters
    def local_shape(layout: Layout, shape: Shape) -> Shape:
        return layout.local_shape(shape, plan.mesh.sizes, coordinate)

    return [local_shape(parameter.layout, parameter.spec.shape) for parameter in parameters]


def final_collectives(pp_rank: int, coordinate: dict[str, int], plan: Plan) -> list[Collective]:
    """The messages of `training.loop.gradients.Gradients.finalise`, after the data strategy is done.

    One all-reduce per set of partial axes (per axis of the set) and one over the embedding group.
    """
    tied = {name for pair in plan.tied_copies for name in pair}
    partial_bytes: Counter[tuple[str, ...]] = Counter()
    tied_bytes: list[int] = []
    for parameter, count in distinct_parameters(plan, pp_rank):
        spec, is_tied = parameter.spec, parameter.name in tied
        if not spec.frozen and (parameter.layout.partial or is_tied):
            layout = plan.data.state_layout(spec, parameter.layout, plan)
            num_bytes = reduce_bytes(plan) * count * layout.local_numel(spec.shape, plan.mesh.sizes, coordinate)
            partial_bytes[layout.partial] += num_bytes
            tied_bytes += [num_bytes] if is_tied else []
    out = [
        Collective(axis, "all_reduce", "partial", 1, payload)
        for axes, payload in sorted(partial_bytes.items())
        for axis in axes
        if plan.mesh.size(axis) > 1
    ]
    return [*out, Collective("embedding", "all_reduce", "tied", 1, sum(tied_bytes))] if tied_bytes else out


def inner_sums(pp_rank: int, coordinate: dict[str, int], plan: Plan) -> list[Collective]:
    """The all-reduces inside a worker, one for each bucket, where they come before the exchange between workers."""
    buckets = buckets_of(pp_rank, coordinate, plan)
    axes = [inner_axis(parts[0][0].layout, plan) for parts in buckets.parts]
    return [
        Collective(axis, "all_reduce", "gradients", 1, buckets.sent_bytes(number, padded=False))
        for number, axis in enumerate(axes)
        if plan.mesh.size(axis) > 1
    ]


def summing_bytes(pp_rank: int, coordinate: dict[str, int], plan: Plan) -> int:
    """Bytes of the flat copies of the gradients of two buckets, as many as `sum_buckets` sends at a time."""
    buckets = buckets_of(pp_rank, coordinate, plan)
    sizes = [buckets.sent_bytes(number, padded=False) for number in range(len(buckets.parts))]
    return max(map(sum, zip(sizes, [*sizes[1:], 0])), default=0)


def buckets_of(pp_rank: int, coordinate: dict[str, int], plan: Plan) -> RankBuckets:
    """The buckets of a rank, which are computed once."""
    key = "buckets", pp_rank, *sorted(coordinate.items())
    return once(plan.weights_cache, key, lambda: RankBuckets(pp_rank, coordinate, plan))


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
        self._waiting: dict[tuple[int, str], tuple[int, list[int]]] = {}  # by stage and block

    def sent_bytes(self, number: int, padded: bool = True) -> int:
        """Bytes of bucket `number`, padded as ZeRO sends it or without padding."""
        if (number, padded) not in self._sent:
            numel = sum(exchanged_numel(*part, self._plan, padded) for part in self.parts[number])
            self._sent[number, padded] = reduce_bytes(self._plan) * numel
        return self._sent[number, padded]

    def waiting(self, stage: int) -> list[tuple[int, list[int]]]:
        """Per block of a stage, in forward order, before its backward: (bytes outside the buckets, the full buckets).

        They are counted in addition to the buckets, which a rank always holds: backward leaves the gradient of a weight
        outside its bucket until the bucket's last gradient is there. The later stages of the rank have already run and
        left the gradients that fill no bucket.
        """
        if not self._waiting:
            self._simulate_backward()
        return [self._waiting[stage, block] for block in self._plan.stages[stage].blocks]

    def _simulate_backward(self) -> None:
        plan = self._plan
        reader_of = {layer.tied: block.name for block in plan.spec.blocks for layer in block.layers if layer.tied}
        sizes = [element_bytes(p.spec, plan, p.layout) * prod(s) for p, s in zip(self._trained, self._shapes)]
        of_block: defaultdict[tuple[int, str], list[int]] = defaultdict(list)  # indices by stage and block
        read: defaultdict[str, list[int]] = defaultdict(list)  # indices of tied weights by the block that reads them
        for index, parameter in enumerate(self._trained):
            of_block[parameter.stage, parameter.block].append(index)
            read[reader_of.get(parameter.name, "")].append(index)
        missing, waiting_bytes = [len(parts) for parts in self.parts], [0] * len(self.parts)
        full: list[int] = []
        outside = 0  # bytes in no full bucket, and of tied weights from the block that reads them to their own
        for stage in sorted(plan.stages_of(self._pp_rank), key=lambda stage: -stage.index):
            for block in reversed(stage.blocks):
                self._waiting[stage.index, block] = outside, [*full]
                outside += sum(sizes[index] for index in read[block])
                for index in of_block[stage.index, block]:
                    if index not in self._bucket_of:
                        continue
                    is_early = reader_of.get(self._trained[index].name) in stage.blocks
                    outside += 0 if is_early else sizes[index]
                    bucket = self._bucket_of[index]
                    waiting_bytes[bucket] += sizes[index]
                    missing[bucket] -= 1
                    if not missing[bucket]:
                        outside -= waiting_bytes[bucket]
                        full.append(bucket)
