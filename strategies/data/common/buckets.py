"""Buckets of gradients and shards of parameters, as plans predict and runtimes build them. Torch-free.

Gradients become ready from the last layer to the first, so buckets are filled in reverse order of the parameters. The
first bucket is small, so that the exchange starts early (PyTorch DDP, Li et al. 2020, section 3.2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from parallelrun.errors import Problem
from parallelrun.layout import Layout
from parallelrun.model_spec import ParameterSpec
from parallelrun.plan.expert_axes import replica_axis
from parallelrun.plan.parameters import HeldParameter, held_parameters
from parallelrun.plan.request import Request
from parallelrun.plan.structure import Collective, Plan
from parallelrun.precision import BYTES

FIRST_BUCKET_BYTES = 2**20
Shape = tuple[int, ...]


def fill(sizes: Sequence[int], limit: int) -> tuple[tuple[int, ...], ...]:
    """Indices of `sizes` (bytes) in buckets: in reverse order, each bucket closed once it has reached its limit.

    The first bucket's limit is 1 MiB, or `limit` if that is less. Every index is in exactly one bucket.
    """
    buckets: list[tuple[int, ...]] = []
    filling: list[int] = []
    held = 0
    for index in reversed(range(len(sizes))):
        filling.append(index)
        held += sizes[index]
        if held >= (limit if buckets else min(limit, FIRST_BUCKET_BYTES)):
            buckets.append(tuple(filling))
            filling, held = [], 0
    return (*buckets, tuple(filling)) if filling else tuple(buckets)


def shard_dim(parameter: ParameterSpec, tensor_layout: Layout, axis: str, plan: Plan) -> int:
    """The dim along which `axis` shards a parameter with that tensor layout: 0, padded where it is uneven.

    An expert's matrix is sharded along dim 1 where the experts of a rank do not divide evenly, which padding would
    multiply, and where dim 1 does: FSDP2 shards no dim but 0 unevenly. This is torchtitan's rule.
    """
    if parameter.layer_role != "expert":
        return 0
    num_copies = plan.mesh.size(axis)
    experts, rows = (prod(plan.mesh.size(name) for name in axes) for axes in tensor_layout.dims[:2])
    is_even = parameter.shape[0] // experts % num_copies == 0  # ep divides the experts
    return 0 if is_even or parameter.shape[1] % (rows * num_copies) else 1


def shard_layout(parameter: ParameterSpec, tensor_layout: Layout, axis: str, plan: Plan) -> Layout:
    """The layout of a parameter that is sharded over its copies on `axis`."""
    if plan.mesh.size(axis) == 1:
        return tensor_layout
    return tensor_layout.split(shard_dim(parameter, tensor_layout, axis, plan), axis)


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


def padded_numel(shape: Sequence[int], parts: int, dim: int = 0) -> int:
    """Elements of a tensor whose dim `dim` is padded to `parts` equal chunks, as `torch.chunk` sizes them."""
    return parts * -(-shape[dim] // parts) * prod(shape[:dim]) * prod(shape[dim + 1 :])


def local_shapes(held: Sequence[HeldParameter], coordinate: dict[str, int], plan: Plan) -> list[Shape]:
    """Shapes of the parameters before the data strategy shards them: split by the tensor axes and ep only."""
    known: dict[tuple[Layout, Shape], Shape] = {}
    for parameter in held:
        key = parameter.layout, parameter.spec.shape
        if key not in known:
            known[key] = parameter.layout.local_shape(parameter.spec.shape, plan.mesh.sizes, coordinate)
    return [known[parameter.layout, parameter.spec.shape] for parameter in held]


def reduce_bytes(plan: Plan) -> int:
    """Bytes of one element of a gradient while it is reduced."""
    return BYTES[plan.precision.reduce]


def trained_parameters(plan: Plan, pp_rank: int) -> list[HeldParameter]:
    """The parameters of a pp rank that the optimizer updates."""
    return [parameter for parameter in held_parameters(plan, pp_rank) if not parameter.spec.frozen]


def sum_axis(held: HeldParameter, plan: Plan) -> str:
    """The axis over which a parameter's gradient is summed: that of its copies."""
    return replica_axis(held.layout, plan)


def is_summed(held: HeldParameter, plan: Plan) -> bool:
    """Whether a parameter has copies. Without (experts where ep is all of dp) its gradient is final after backward."""
    return plan.mesh.size(sum_axis(held, plan)) > 1


def exchanged_numel(held: HeldParameter, shape: Sequence[int], plan: Plan, padded: bool) -> int:
    """Elements that are sent of a parameter of local `shape`. padded: to equal chunks for all its copies."""
    if not padded:
        return prod(shape)
    axis = sum_axis(held, plan)
    return padded_numel(shape, plan.mesh.size(axis), shard_dim(held.spec, held.layout, axis, plan))


@dataclass(frozen=True)
class Filled:
    """One bucket: the axis over which it is summed, and the indices of its parameters in a list of trained ones."""

    axis: str
    indices: tuple[int, ...]


def partition(
    trained: Sequence[HeldParameter], shapes: Sequence[Shape], plan: Plan, padded: bool = False
) -> list[Filled]:
    """The buckets of parameters with those local shapes, in launch order. Parameters without copies are in none.

    No bucket spans two axes. Buckets of several axes are launched in the order in which backward fills them, which is
    the same on every rank.
    """
    by_axis: dict[str, list[int]] = {}
    for index, held in enumerate(trained):
        if is_summed(held, plan):
            by_axis.setdefault(sum_axis(held, plan), []).append(index)
    size, found = reduce_bytes(plan), []
    for axis, own in by_axis.items():
        sizes = [size * exchanged_numel(trained[index], shapes[index], plan, padded) for index in own]
        found += [Filled(axis, tuple(own[i] for i in bucket)) for bucket in fill(sizes, plan.data.bucket_bytes)]
    return sorted(found, key=lambda bucket: -bucket.indices[-1])


@dataclass(frozen=True)
class Contents:
    """A bucket's axis and its parameters with their local shapes, not padded."""

    axis: str
    parts: tuple[tuple[HeldParameter, Shape], ...]


def contents(pp_rank: int, coordinate: dict[str, int], plan: Plan) -> list[Contents]:
    """The buckets of a rank that sums unsharded gradients, in launch order."""
    key = "bucket contents", pp_rank, *sorted(coordinate.items())
    if key not in plan.cache:
        trained = trained_parameters(plan, pp_rank)
        shapes = local_shapes(trained, coordinate, plan)
        plan.cache[key] = [
            Contents(bucket.axis, tuple((trained[index], shapes[index]) for index in bucket.indices))
            for bucket in partition(trained, shapes, plan)
        ]
    found: list[Contents] = plan.cache[key]
    return found


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


Filling = Callable[[list[HeldParameter], list[Shape]], Sequence[Filled]]


class WaitingGradients:
    """Bytes of gradients that wait during backward until their bucket is full, on one rank.

    They are counted beside the buckets, which a rank always holds: backward leaves the gradient of a weight outside its
    bucket until the bucket's last gradient is there. fill: returns the buckets of trained parameters and their shapes.
    """

    def __init__(self, pp_rank: int, coordinate: dict[str, int], plan: Plan, fill: Filling):
        self._plan, self._pp_rank = plan, pp_rank
        self._trained = trained_parameters(plan, pp_rank)
        self._shapes = local_shapes(self._trained, coordinate, plan)
        self.buckets = list(fill(self._trained, self._shapes))
        self._bucket_of = {index: number for number, one in enumerate(self.buckets) for index in one.indices}
        self._reader = {
            layer.tied: block.name for block in plan.spec.blocks for layer in block.layers if layer.tied is not None
        }
        self._padded = [self._exchanged_bytes(bucket, True) for bucket in self.buckets]
        self._of_stage: dict[int, list[tuple[int, list[int]]]] = {}

    def _exchanged_bytes(self, bucket: Filled, padded: bool) -> int:
        numel = sum(exchanged_numel(self._trained[i], self._shapes[i], self._plan, padded) for i in bucket.indices)
        return reduce_bytes(self._plan) * numel

    def sent_bytes(self, number: int, padded: bool = True) -> int:
        """Bytes of bucket `number`, padded as it is sent or without padding."""
        return self._padded[number] if padded else self._exchanged_bytes(self.buckets[number], False)

    def stage_of(self, number: int) -> int:
        """The stage of a bucket that spans no other."""
        return self._trained[self.buckets[number].indices[0]].stage

    def of_stage(self, stage: int) -> list[tuple[int, list[int]]]:
        """Per block of a stage, in forward order, before its backward: (bytes outside the buckets, the full buckets).

        The later stages of the rank have already run and left the gradients that fill no bucket.
        """
        if stage not in self._of_stage:
            self._of_stage[stage] = self._walk_to(stage)
        return self._of_stage[stage]

    def _walk_to(self, stage: int) -> list[tuple[int, list[int]]]:
        sizes = [BYTES[self._plan.precision.stored] * prod(shape) for shape in self._shapes]
        held: dict[tuple[int, str], list[int]] = {}  # indices by stage and block
        read: dict[str, list[int]] = {}  # indices of tied weights by the block that reads them
        for index, parameter in enumerate(self._trained):
            held.setdefault((parameter.stage, parameter.block), []).append(index)
            read.setdefault(self._reader.get(parameter.name, ""), []).append(index)
        missing = [len(bucket.indices) for bucket in self.buckets]
        beside = [0] * len(self.buckets)
        full: list[int] = []
        outside = (
            0  # bytes: in no full bucket, and of tied weights from the block that reads them to the one they are in
        )
        found: dict[str, tuple[int, list[int]]] = {}
        for own in sorted(self._plan.stages_of(self._pp_rank), key=lambda one: -one.index):
            for block in reversed(own.blocks):
                if own.index == stage:
                    found[block] = outside, [*full]
                outside += sum(sizes[index] for index in read.get(block, ()))
                for index in held.get((own.index, block), ()):
                    if index not in self._bucket_of:
                        continue
                    is_early = self._reader.get(self._trained[index].name) in own.blocks
                    outside += 0 if is_early else sizes[index]
                    bucket = self._bucket_of[index]
                    beside[bucket] += sizes[index]
                    missing[bucket] -= 1
                    if not missing[bucket]:
                        outside -= beside[bucket]
                        full.append(bucket)
        return [found[block] for block in self._plan.stages[stage].blocks]
