"""Bucket arithmetic shared by the data ways' plans and runtimes. Torch-free.

Gradients become ready from the last layer to the first, so buckets are filled in reverse order of the parameters; the
first is small, so that the exchange starts early (PyTorch DDP, Li et al. 2020, section 3.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from parallelrun.layout import Layout
from parallelrun.plan.structure import Collective, DataWay, Plan
from parallelrun.plan.ways import Request
from parallelrun.precision import BYTES
from parallelrun.train.parameters import HeldParameter, held_parameters

FIRST_BUCKET_BYTES = 2**20


def settle(request: Request) -> DataWay:
    """The DataWay of a way that has no settings but the size of its buckets."""
    data = request.config.strategy.data
    return DataWay(data.kind, bucket_bytes=int(data.bucket_mb * 2**20))


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


def padded_numel(shape: Sequence[int], parts: int) -> int:
    """Elements of a tensor whose dim 0 is padded to `parts` equal chunks, as `torch.chunk` sizes them."""
    return parts * -(-shape[0] // parts) * prod(shape[1:])


def local_shapes(held: Sequence[HeldParameter], coordinate: dict[str, int], plan: Plan) -> list[tuple[int, ...]]:
    """Shapes as the module stores the parameters before any data way: split by the tensor axes only."""
    return [p.layout.local_shape(p.spec.shape, plan.mesh.sizes, coordinate) for p in held]


def reduce_bytes(plan: Plan) -> int:
    """Bytes of one element of a gradient on its way."""
    return BYTES[plan.precision.reduce]


def bucket_numels(position: int, coordinate: dict[str, int], plan: Plan, parts: int) -> list[int]:
    """Elements of each bucket of a rank, in launch order, with every parameter padded to `parts` chunks (1: none)."""
    held = [parameter for parameter in held_parameters(plan, position) if not parameter.spec.frozen]
    shapes = local_shapes(held, coordinate, plan)
    numels = [padded_numel(shape, parts) if parts > 1 else prod(shape) for shape in shapes]
    size = reduce_bytes(plan)
    filled = fill([numel * size for numel in numels], plan.data.bucket_bytes)
    return [sum(numels[index] for index in bucket) for bucket in filled]


def contents(
    position: int, coordinate: dict[str, int], plan: Plan
) -> list[list[tuple[HeldParameter, tuple[int, ...]]]]:
    """The parameters of each bucket of a rank with their local shapes, in launch order, none of them padded."""
    held = [parameter for parameter in held_parameters(plan, position) if not parameter.spec.frozen]
    shapes = local_shapes(held, coordinate, plan)
    filled = fill([prod(shape) * reduce_bytes(plan) for shape in shapes], plan.data.bucket_bytes)
    return [[(held[index], shapes[index]) for index in bucket] for bucket in filled]


def final_collectives(
    layouts: Sequence[tuple[HeldParameter, Layout]], coordinate: dict[str, int], plan: Plan
) -> list[Collective]:
    """What `train.gradients.Gradients.finalise` sends after the data way is done, given each parameter's state layout.

    One all-reduce per set of partial axes (per axis of the set) and one over the embedding group.
    """
    layouts = [(p, layout) for p, layout in layouts if not p.spec.frozen]
    numels = {p.name: layout.local_numel(p.spec.shape, plan.mesh.sizes, coordinate) for p, layout in layouts}
    out = []
    for axes in sorted({layout.partial for _, layout in layouts} - {()}):
        payload = reduce_bytes(plan) * sum(numels[p.name] for p, layout in layouts if layout.partial == axes)
        out += [Collective(axis, "all_reduce", "partial", 1, payload) for axis in axes if plan.mesh.size(axis) > 1]
    tied = {name for pair in plan.tied_copies for name in pair}
    sizes = [numel for name, numel in numels.items() if name in tied]
    if sizes:
        out.append(Collective("embedding", "all_reduce", "tied", 1, reduce_bytes(plan) * sum(sizes)))
    return out
