"""Bucket arithmetic shared by the data strategies' plans and runtimes. Torch-free.

Gradients become ready from the last layer to the first, so buckets are filled in reverse order of the parameters; the
first is small, so that the exchange starts early (PyTorch DDP, Li et al. 2020, section 3.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from parallelrun.layout import Layout
from parallelrun.plan.expert_axes import replica_axis
from parallelrun.plan.parameters import HeldParameter, held_parameters
from parallelrun.plan.structure import Collective, Plan
from parallelrun.precision import BYTES

from .sharding import shard_dim

FIRST_BUCKET_BYTES = 2**20


def fill(sizes: Sequence[int], limit: int) -> tuple[tuple[int, ...], ...]:
    """Indices of `sizes` (bytes) in buckets: reverse order, each bucket closed once it has reached its limit.

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


def padded_numel(shape: Sequence[int], parts: int, dim: int = 0) -> int:
    """Elements of a tensor whose dim `dim` is padded to `parts` equal chunks, as `torch.chunk` sizes them."""
    return parts * -(-shape[dim] // parts) * prod(shape[:dim]) * prod(shape[dim + 1 :])


def local_shapes(held: Sequence[HeldParameter], coordinate: dict[str, int], plan: Plan) -> list[tuple[int, ...]]:
    """Shapes as the module stores the parameters before any data strategy: split by the tensor axes and ep only."""
    known: dict[tuple[Layout, tuple[int, ...]], tuple[int, ...]] = {}
    out = []
    for parameter in held:
        key = parameter.layout, parameter.spec.shape
        if key not in known:
            known[key] = parameter.layout.local_shape(parameter.spec.shape, plan.mesh.sizes, coordinate)
        out.append(known[key])
    return out


def reduce_bytes(plan: Plan) -> int:
    """Bytes of one element of a gradient on its way."""
    return BYTES[plan.precision.reduce]


@dataclass(frozen=True)
class Filled:
    """One bucket: the axis over which it is summed, and its parameters by their place in a list of trained ones."""

    axis: str
    indices: tuple[int, ...]


def sum_axis(held: HeldParameter, plan: Plan) -> str:
    """The axis over which a parameter's gradient is summed: where its copies lie."""
    return replica_axis(held.layout, plan)


def is_summed(held: HeldParameter, plan: Plan) -> bool:
    """Has it copies? Without (experts where ep is all of dp) its gradient is final as backward leaves it."""
    return plan.mesh.size(sum_axis(held, plan)) > 1


def exchanged_numel(held: HeldParameter, shape: Sequence[int], plan: Plan, padded: bool) -> int:
    """Elements of a parameter of local `shape` on their way; padded: to equal chunks for all its copies."""
    if not padded:
        return prod(shape)
    axis = sum_axis(held, plan)
    return padded_numel(shape, plan.mesh.size(axis), shard_dim(held.spec, held.layout, axis, plan))


def partition(
    trained: Sequence[HeldParameter], shapes: Sequence[tuple[int, ...]], plan: Plan, padded: bool = False
) -> tuple[Filled, ...]:
    """The buckets of parameters of those local shapes, in launch order.

    No bucket spans two axes. Buckets of several axes are launched by which is full first in backward, which is the same
    on every rank. What has no copies is in none.
    """
    by_axis: dict[str, list[int]] = {}
    for index, held in enumerate(trained):
        if is_summed(held, plan):
            by_axis.setdefault(sum_axis(held, plan), []).append(index)
    size, found = reduce_bytes(plan), []
    for axis, own in by_axis.items():
        sizes = [size * exchanged_numel(trained[index], shapes[index], plan, padded) for index in own]
        filled = fill(sizes, plan.data.bucket_bytes)
        found += [Filled(axis, tuple(own[place] for place in bucket)) for bucket in filled]
    return tuple(sorted(found, key=lambda bucket: -bucket.indices[-1]))


def trained_parameters(plan: Plan, pp_rank: int) -> list[HeldParameter]:
    """Those of a pp rank that the optimizer updates."""
    return [parameter for parameter in held_parameters(plan, pp_rank) if not parameter.spec.frozen]


@dataclass(frozen=True)
class Contents:
    """A bucket's axis and its parameters with their local shapes, none of them padded."""

    axis: str
    parts: tuple[tuple[HeldParameter, tuple[int, ...]], ...]


def contents(pp_rank: int, coordinate: dict[str, int], plan: Plan) -> list[Contents]:
    """The buckets of a rank that sums whole gradients, in launch order."""
    key = "bucket contents", pp_rank, *sorted(coordinate.items())
    if key not in plan.cache:
        trained = trained_parameters(plan, pp_rank)
        shapes = local_shapes(trained, coordinate, plan)
        plan.cache[key] = [
            Contents(bucket.axis, tuple((trained[index], shapes[index]) for index in bucket.indices))
            for bucket in partition(trained, shapes, plan)
        ]
    return plan.cache[key]


def final_collectives(
    layouts: Sequence[tuple[HeldParameter, Layout]], coordinate: dict[str, int], plan: Plan
) -> list[Collective]:
    """What `train.gradients.Gradients.finalise` sends after the data strategy is done, given each parameter's state
    layout.

    One all-reduce per set of partial axes (per axis of the set) and one over the embedding group.
    """
    tied = {name for pair in plan.tied_copies for name in pair}
    layouts = [(p, layout) for p, layout in layouts if not p.spec.frozen and (layout.partial or p.name in tied)]
    numels = {p.name: layout.local_numel(p.spec.shape, plan.mesh.sizes, coordinate) for p, layout in layouts}
    out = []
    for axes in sorted({layout.partial for _, layout in layouts} - {()}):
        payload = reduce_bytes(plan) * sum(numels[p.name] for p, layout in layouts if layout.partial == axes)
        out += [Collective(axis, "all_reduce", "partial", 1, payload) for axis in axes if plan.mesh.size(axis) > 1]
    sizes = [numel for name, numel in numels.items() if name in tied]
    if sizes:
        out.append(Collective("embedding", "all_reduce", "tied", 1, reduce_bytes(plan) * sum(sizes)))
    return out
