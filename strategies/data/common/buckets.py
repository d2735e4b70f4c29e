"""How parameters are put into buckets and cut into shards. Plans predict with it, and runtimes follow it.

Gradients become ready from the last layer to the first, so buckets are filled in reverse order of the parameters. The
first bucket is small, so that the exchange starts early (PyTorch DDP, Li et al. 2020, section 3.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from parallelrun.base.layout import Layout
from parallelrun.base.precision import BYTES
from parallelrun.planner.contract.data_strategy import Bucket
from parallelrun.planner.contract.parameters import HeldParameter
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.model.model_spec import ParameterSpec
from parallelrun.planner.pieces.expert_axes import inner_axis, replica_axis

FIRST_BUCKET_BYTES = 2**20
MAX_PENDING = 2  # zero2's exchanges that have not ended: one bucket is sent while the next one fills
# Weights of these roles are rounded to the compute dtype wherever they are used, so they may travel in it. Others (an
# embedding sums many rows' gradients in its own dtype; a user's layers cast nothing) travel as stored: results must be
# those of every other data strategy.
ROUNDED_ROLES = ("column_parallel", "row_parallel", "norm", "head", "expert")
Shape = tuple[int, ...]


def fill(sizes: Sequence[int], limit: int) -> tuple[tuple[int, ...], ...]:
    """Indices of `sizes` (bytes) in buckets: in reverse order, each bucket closed once it has reached its limit.

    The first bucket's limit is 1 MiB, or `limit` if that is less.
    """
    buckets: list[tuple[int, ...]] = []
    filling: list[int] = []
    size = 0
    for index in reversed(range(len(sizes))):
        filling.append(index)
        size += sizes[index]
        if size >= (limit if buckets else min(limit, FIRST_BUCKET_BYTES)):
            buckets.append(tuple(filling))
            filling, size = [], 0
    return (*buckets, tuple(filling)) if filling else tuple(buckets)


def partition(
    trained: Sequence[HeldParameter],
    shapes: Sequence[Shape],
    plan: Plan,
    padded: bool = False,
    only: Sequence[int] | None = None,
) -> list[Bucket]:
    """The buckets of parameters with those local shapes, in the order in which backward fills them on every rank.

    padded: parameters are as large as their chunks with padding. only: the parameters with these indices. No bucket
    spans two axes, inside workers or between them, nor dtypes of weights.
    """
    by_kind: dict[tuple[str, str, str], list[int]] = {}
    for index in range(len(trained)) if only is None else only:
        parameter = trained[index]
        if is_summed(parameter, plan):
            dtype = plan.data.weight_dtype(parameter.spec, parameter.layout, plan)
            axes = replica_axis(parameter.layout, plan), inner_axis(parameter.layout, plan)
            by_kind.setdefault((*axes, dtype), []).append(index)
    size, buckets = reduce_bytes(plan), []
    for (axis, *_), own in by_kind.items():
        sizes = [size * exchanged_numel(trained[index], shapes[index], plan, padded) for index in own]
        buckets += [Bucket(axis, tuple(own[i] for i in bucket)) for bucket in fill(sizes, plan.data.bucket_bytes)]
    return sorted(buckets, key=lambda bucket: -bucket.indices[-1])


def is_summed(parameter: HeldParameter, plan: Plan) -> bool:
    """Whether a parameter has copies. Without (experts where ep is all of dp) its gradient is final after backward."""
    return plan.mesh.size(replica_axis(parameter.layout, plan)) > 1


def exchanged_numel(parameter: HeldParameter, shape: Shape, plan: Plan, padded: bool) -> int:
    """Elements that are sent of a parameter of local `shape`. padded: to equal chunks for all its copies."""
    if not padded:
        return prod(shape)
    axis = replica_axis(parameter.layout, plan)
    return padded_numel(shape, plan.mesh.size(axis), shard_dim(parameter.spec, parameter.layout, axis, plan))


def padded_numel(shape: Sequence[int], parts: int, dim: int = 0) -> int:
    """Elements of a tensor whose dim `dim` is padded to `parts` equal chunks, as `torch.chunk` sizes them."""
    shape = shape or (parts,)  # without dims it is in every part
    return parts * -(-shape[dim] // parts) * prod(shape[:dim]) * prod(shape[dim + 1 :])


def reduce_bytes(plan: Plan) -> int:
    """Bytes of one element of a gradient while it is reduced."""
    return BYTES[plan.precision.reduce]


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
    """The layout of a parameter that is sharded over its copies on `axis`. One without dims stays complete."""
    if plan.mesh.size(axis) == 1 or not parameter.shape:
        return tensor_layout
    return tensor_layout.split(shard_dim(parameter, tensor_layout, axis, plan), axis)
