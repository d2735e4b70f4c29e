"""Gradient compression: gradients are sent as they are, in 16 bits, or as two low-rank factors.

The strategies that all-reduce gradients in buckets (ddp, ring, horovod) have a Compression: they predict one all-reduce
per `SummedMessage`, and their runtime sends a bucket through the `sender` of the module that `registry` names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import ClassVar

from parallelrun.base.errors import Problem
from parallelrun.base.layout import Layout
from parallelrun.base.precision import BYTES, TABLE
from parallelrun.config.schema.run_schema import Config
from parallelrun.planner.contract.parameters import HeldParameter, distinct_parameters
from parallelrun.planner.contract.plan import Equivalence, Plan
from parallelrun.planner.contract.request import Request
from parallelrun.planner.pieces.expert_axes import replica_axis

from ..keys import CompressionKeys

DEFAULT_RANK = 4
Parts = Sequence[tuple[HeldParameter, tuple[int, ...]]]  # the parameters of a bucket, with their local shapes


@dataclass(frozen=True)
class SummedMessage:
    """One all-reduce: elements, bytes of each, and the axis over which they are summed."""

    numel: int
    element_bytes: int
    axis: str = "dp"

    @property
    def payload_bytes(self) -> int:
        return self.numel * self.element_bytes


@dataclass(frozen=True)
class Compression:
    """The base class, which sends gradients as they are. rank: columns of PowerSGD's factors; 0: there are none.
    can_undo: what it keeps is copied in each step: one that is not applied (fp16) or is repeated (sdc) leaves no trace.
    """

    compresses: ClassVar[bool] = False
    elementwise: ClassVar[bool] = True  # every element is sent by itself

    kind: str = field(default="none", init=False)
    rank: int = 0
    can_undo: bool = False

    @classmethod
    def of(cls, config: Config) -> Compression:
        """The compression with the settings of a configuration."""
        return cls()

    def check(self, request: Request) -> list[Problem]:
        """Settings that contradict the compression."""
        rank, where, problems = CompressionKeys.of(request.config).powersgd_rank, "strategy.data.compression", []
        if rank is not None and not self.rank:
            message = f"strategy.data.powersgd_rank={rank} is read by compression=powersgd only"
            problems.append(Problem(message, "strategy.data.powersgd_rank", f"{where}=powersgd", kind="unread"))
        return problems

    def dtype(self, plan: Plan) -> str:
        """The dtype in which elements are sent."""
        return plan.precision.reduce

    def messages(self, bucket: Parts, plan: Plan) -> list[SummedMessage]:
        """The all-reduces of one bucket, in the order in which they are started."""
        return [SummedMessage(sum(prod(shape) for _, shape in bucket), BYTES[self.dtype(plan)])]

    def held_bytes(self, bucket: Parts, plan: Plan) -> int:
        """Bytes kept to compress one bucket: its messages."""
        return sum(message.payload_bytes for message in self.messages(bucket, plan)) if self.compresses else 0

    def saved_bytes(self, plan: Plan) -> int:
        """Bytes of a checkpoint, over all ranks, of what it keeps of the compression."""
        return 0

    def equivalence(self, plan: Plan) -> Equivalence:
        """Exact where nothing is compressed."""
        return Equivalence("exact")


@dataclass(frozen=True)
class HalfPrecision(Compression):
    """Cast to fp16 before the sum, back after.

    bound: of the errors that a backend's order of rounding causes, for each replica. floor: the smallest normal number;
    smaller ones are rounded to multiples of 2^-24.
    """

    compresses = True
    sent_dtype: ClassVar[str] = "float16"
    bound: ClassVar[float] = 2.0**-8
    floor: ClassVar[float] = 2.0**-14

    kind: str = field(default="fp16", init=False)

    def dtype(self, plan: Plan) -> str:
        return self.sent_dtype

    def equivalence(self, plan: Plan) -> Equivalence:
        """Equal to a replay, up to the difference that the backend's order of rounding may cause."""
        detail = f"gradients rounded to {self.kind} before they are summed over dp"
        return Equivalence("replay", detail, plan.mesh.size("dp") * self.bound, self.floor)


@dataclass(frozen=True)
class BFloat16(HalfPrecision):
    """Cast to bf16, which has 3 bits less and the range of fp32."""

    sent_dtype = "bfloat16"
    bound = 2.0**-5
    floor = 0.0

    kind: str = field(default="bf16", init=False)


@dataclass(frozen=True)
class PowerSGD(Compression):
    """Matrices are sent as two factors, where these are smaller; other gradients are sent as they are."""

    compresses = True
    elementwise = False

    kind: str = field(default="powersgd", init=False)
    rank: int = DEFAULT_RANK

    @classmethod
    def of(cls, config: Config) -> PowerSGD:
        can_undo = TABLE[config.precision.name].scaled or config.sdc.every > 0
        return cls(CompressionKeys.of(config).powersgd_rank or DEFAULT_RANK, can_undo)

    def is_factored(self, parameter: HeldParameter, shape: Sequence[int], plan: Plan) -> bool:
        """Whether this parameter's gradient (local `shape`) is sent as factors.

        It is where the factors are smaller. A gradient that is summed again after the exchange over dp (partial over an
        axis, a copy of a tied weight) is sent as it is, or the plan would change the result.
        """
        tied = {name for pair in plan.tied_copies for name in pair}
        if len(shape) < 2 or parameter.layout.partial or parameter.name in tied:
            return False
        _, rows, columns = matrix_sizes(parameter, shape)
        return 0 < (rows + columns) * min(self.rank, rows, columns) < rows * columns

    def messages(self, bucket: Parts, plan: Plan) -> list[SummedMessage]:
        """Tensors that are not factored, left factors, right factors, each flat. Empty ones are left out."""
        factored = self._factored(bucket, plan)
        uncompressed = sum(prod(shape) for _, shape in bucket) - sum(prod(sizes) for sizes in factored)
        left = sum(count * rows * self.rank for count, rows, _ in factored)
        right = sum(count * columns * self.rank for count, _, columns in factored)
        size = BYTES[self.dtype(plan)]
        return [SummedMessage(numel, size) for numel in (uncompressed, left, right) if numel]

    def held_bytes(self, bucket: Parts, plan: Plan) -> int:
        """The messages, the errors and two more right factors; the copies of errors and of a factor."""
        factored, copies = self._factored(bucket, plan), int(self.can_undo)
        more = sum(
            count * columns * ((1 + copies) * rows + (2 + copies) * self.rank) for count, rows, columns in factored
        )
        return super().held_bytes(bucket, plan) + BYTES[self.dtype(plan)] * more

    def saved(self, parameter: HeldParameter, plan: Plan) -> dict[str, tuple[tuple[int, ...], Layout]]:
        """(shape, layout) of what a checkpoint keeps of a parameter, by name: the error and the right factor of each
        rank that sends factors, along a dim of senders. Empty if not all ranks factor their part of the parameter."""
        shape, layout, axis = parameter.spec.shape, parameter.layout, replica_axis(parameter.layout, plan)
        ends = (plan.mesh.coordinate(rank) for rank in (0, plan.mesh.num_ranks - 1))  # the largest and smallest part
        parts = [layout.local_shape(shape, plan.mesh.sizes, end) for end in ends]
        senders = plan.mesh.size(axis)
        if senders == 1 or not all(self.is_factored(parameter, part, plan) for part in parts):
            return {}
        rows = row_dim(parameter)
        num_cuts = prod(plan.mesh.size(name) for name in layout.dims[rows])
        factor = senders, *shape[:rows], num_cuts, *shape[rows + 1 :], self.rank
        return {
            "error": ((senders, *shape), Layout(((axis,), *layout.dims))),
            "factor": (factor, Layout(((axis,), *layout.dims, ()))),
        }

    def saved_bytes(self, plan: Plan) -> int:
        held = (pair for pp_rank in range(plan.mesh.size("pp")) for pair in distinct_parameters(plan, pp_rank))
        numel = sum(
            count * prod(shape)
            for parameter, count in held
            if not parameter.spec.frozen
            for shape, _ in self.saved(parameter, plan).values()
        )
        return BYTES[self.dtype(plan)] * numel

    def equivalence(self, plan: Plan) -> Equivalence:
        return Equivalence("replay", f"PowerSGD of rank {self.rank} with error feedback")

    def _factored(self, bucket: Parts, plan: Plan) -> list[tuple[int, int, int]]:
        """(count, rows, columns) of the matrices of the factored gradients of a bucket."""
        return [matrix_sizes(*part) for part in bucket if self.is_factored(*part, plan)]


def row_dim(parameter: HeldParameter) -> int:
    """The dim of a parameter that is the rows of its matrices: 1 of experts' weights, of which each has its own."""
    return int(parameter.spec.layer_role == "expert" and len(parameter.spec.shape) == 3)


def matrix_sizes(parameter: HeldParameter, shape: Sequence[int]) -> tuple[int, int, int]:
    """(count, rows, columns) of a gradient of local `shape` seen as matrices."""
    rows = row_dim(parameter)
    return prod(shape[:rows]), shape[rows], prod(shape[rows + 1 :])


KINDS: dict[str, type[Compression]] = {cls.kind: cls for cls in (Compression, HalfPrecision, BFloat16, PowerSGD)}


def requested_compression(config: Config) -> Compression:
    """The compression that a configuration asks for."""
    return KINDS[CompressionKeys.of(config).compression].of(config)


def used_compression(request: Request) -> Compression:
    """The compression of gradients over dp: none where dp=1 sums nothing."""
    return requested_compression(request.config) if request.dp > 1 else Compression()
