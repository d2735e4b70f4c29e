"""Gradient compression: gradients are sent as they are, as fp16, or as two low-rank factors. Torch-free.

The strategies that all-reduce gradients in buckets (ddp, ring, horovod) offer it: they predict one all-reduce per
`SummedMessage`, and their runtime sends through `runtime.compress`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from parallelrun.config.schema import Config
from parallelrun.errors import Problem
from parallelrun.plan.parameters import HeldParameter
from parallelrun.plan.request import Request
from parallelrun.plan.structure import Equivalence, Plan
from parallelrun.precision import BYTES

from ..keys import CompressionKeys

KINDS = ("none", "fp16", "powersgd")
DEFAULT_RANK = 4
HALF_BYTES = 2


@dataclass(frozen=True)
class Compression:
    """kind: none | fp16 (cast before the sum, back after) | powersgd (rank: columns of its factors)."""

    kind: str = "none"
    rank: int = 0


@dataclass(frozen=True)
class SummedMessage:
    """One all-reduce: elements, bytes of each, and the axis over which they are summed."""

    numel: int
    element_bytes: int
    axis: str = "dp"

    @property
    def payload_bytes(self) -> int:
        return self.numel * self.element_bytes


def of(config: Config) -> Compression:
    """The Compression that a configuration asks for."""
    data = CompressionKeys.of(config)
    rank = data.powersgd_rank or DEFAULT_RANK
    return Compression(data.compression, rank if data.compression == "powersgd" else 0)


def check(request: Request) -> list[Problem]:
    """Compressions that contradict other settings."""
    config, problems = request.config, []
    data = CompressionKeys.of(config)
    if data.powersgd_rank is not None and data.compression != "powersgd":
        what = f"strategy.data.powersgd_rank={data.powersgd_rank} is read by compression=powersgd only"
        where = "strategy.data.powersgd_rank"
        problems.append(Problem(what, where, "strategy.data.compression=powersgd", kind="unread"))
    if data.compression == "powersgd" and config.precision.name == "fp16" and request.dp > 1:
        what = "PowerSGD's error feedback is invalid after the fp16 loss scale changes"
        problems.append(Problem(what, "strategy.data.compression", "precision=bf16", kind="undefined"))
    if data.compression != "none" and request.ep > 1:
        what = (
            f"strategy.data.compression={data.compression} with ep={request.ep}: experts' gradients are summed over "
            "fewer ranks than the others, and the reference of compressed sums has one set of ranks"
        )
        fix = "strategy.data.compression=none or ep=1"
        problems.append(Problem(what, "strategy.data.compression", fix, kind="not_built"))
    return problems


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """(rows, columns) of a gradient seen as a matrix: dim 0 by all the others."""
    return (shape[0], prod(shape[1:])) if shape else (1, 1)


def num_columns(shape: Sequence[int], rank: int) -> int:
    """Columns of the factors of a gradient of that shape."""
    return min(rank, *matrix_shape(shape))


def is_factored(held: HeldParameter, shape: Sequence[int], plan: Plan, compression: Compression) -> bool:
    """Whether powersgd sends this parameter's gradient (local `shape`) as factors.

    It does where the factors are smaller. A gradient that is summed again after the exchange over dp (partial over an
    axis, a copy of a tied weight) is sent as it is, or the plan would change the result.
    """
    tied = {name for pair in plan.tied_copies for name in pair}
    if compression.kind != "powersgd" or len(shape) < 2 or held.layout.partial or held.name in tied:
        return False
    rows, columns = matrix_shape(shape)
    return 0 < (rows + columns) * num_columns(shape, compression.rank) < rows * columns


def messages(
    bucket: Sequence[tuple[HeldParameter, tuple[int, ...]]], plan: Plan, compression: Compression
) -> tuple[SummedMessage, ...]:
    """The all-reduces of one bucket, of parameters with their local shapes, in the order in which they are started.

    powersgd: what is not factored, the left factors, the right factors; each flat, none if it would be empty.
    """
    size = BYTES[plan.precision.reduce]
    if compression.kind != "powersgd":
        element = HALF_BYTES if compression.kind == "fp16" else size
        return (SummedMessage(sum(prod(shape) for _, shape in bucket), element),)
    factored = [shape for held, shape in bucket if is_factored(held, shape, plan, compression)]
    uncompressed = sum(prod(shape) for _, shape in bucket) - sum(prod(shape) for shape in factored)
    left = sum(matrix_shape(shape)[0] * num_columns(shape, compression.rank) for shape in factored)
    right = sum(matrix_shape(shape)[1] * num_columns(shape, compression.rank) for shape in factored)
    return tuple(SummedMessage(numel, size) for numel in (uncompressed, left, right) if numel)


def held_bytes(bucket: Sequence[tuple[HeldParameter, tuple[int, ...]]], plan: Plan, compression: Compression) -> int:
    """Bytes kept to compress one bucket: its messages, and for powersgd the errors and two more right factors."""
    if compression.kind == "none":
        return 0
    total = sum(message.payload_bytes for message in messages(bucket, plan, compression))
    size = BYTES[plan.precision.reduce]
    for held, shape in bucket:
        if is_factored(held, shape, plan, compression):
            rows, columns = matrix_shape(shape)
            total += size * (rows * columns + 2 * columns * num_columns(shape, compression.rank))
    return total


def equivalence(plan: Plan, compression: Compression) -> Equivalence:
    """Exact where nothing is compressed, else equal to a replay of the compression."""
    if compression.kind == "none" or plan.mesh.size("dp") == 1:
        return Equivalence("exact")
    if compression.kind == "fp16":
        return Equivalence("replay", "gradients rounded to fp16 before they are summed over dp", half_bound(plan))
    return Equivalence("replay", f"PowerSGD of rank {compression.rank} with error feedback")


def half_bound(plan: Plan) -> float:
    """The difference of fp16 sums, in `verify`'s measure, that the backend's order of rounding may cause."""
    return plan.mesh.size("dp") * 2.0**-8
