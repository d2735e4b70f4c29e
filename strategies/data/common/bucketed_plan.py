"""The base class of strategies with complete copies, whose gradients are all-reduced in buckets during backward.

Gradients of experts that are distributed over ep are summed over `expert_dp`, in buckets of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from parallelrun.base.errors import Problem
from parallelrun.planner.contract.collective import Collective
from parallelrun.planner.contract.data_strategy import Bucket, DataStrategy, ExchangeForm
from parallelrun.planner.contract.parameters import HeldParameter
from parallelrun.planner.contract.plan import Equivalence, Plan
from parallelrun.planner.contract.request import Request
from parallelrun.planner.predict.prediction import merge

from .bucket_prediction import buckets_of, final_collectives, inner_sums
from .buckets import Shape, partition
from .compression.plan import Compression, SummedMessage, requested_compression, used_compression
from .keys import BucketKeys

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class BucketedAllReduce(DataStrategy):
    """Every rank of dp holds its stage's complete weights, gradients and optimizer state."""

    takes_experts = True
    takes_context = True

    compression: Compression = field(default_factory=Compression)

    @classmethod
    def check(cls, request: Request) -> list[Problem]:
        return requested_compression(request.config).check(request)

    @classmethod
    def resolve(cls, request: Request) -> Self:
        bucket_bytes = BucketKeys.of(request.config).bucket_bytes
        return cls(bucket_bytes=bucket_bytes, compression=used_compression(request))

    @property
    def sums_workers_first(self) -> bool:
        """A compressed sum depends on how many parts it has."""
        return self.compression.compresses

    def buckets(self, trained: Sequence[HeldParameter], shapes: Sequence[Shape], plan: Plan) -> list[Bucket]:
        return partition(trained, shapes, plan)

    def backward_bytes(self, stage: int, number: int, coordinate: dict[str, int], plan: Plan) -> list[int] | None:
        """The gradients that no bucket has collected yet."""
        return [outside for outside, _ in buckets_of(plan.stages[stage].pp_rank, coordinate, plan).waiting(stage)]

    def bucket_messages(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> list[SummedMessage]:
        """Every sum of one step, in the order in which the buckets are sent."""
        buckets = buckets_of(pp_rank, coordinate, plan)
        return [
            replace(message, axis=axis)
            for axis, parts in zip(buckets.axes, buckets.parts)
            for message in self.compression.messages(parts, plan)
        ]

    def rows_of_sum(self, message: SummedMessage, coordinate: dict[str, int], plan: Plan) -> list[Collective]:
        """The messages of one sum. Override this to change the all-reduce algorithm."""
        return [Collective(message.axis, "all_reduce", "gradients", 1, message.payload_bytes)]

    def collectives(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> list[Collective]:
        messages = self.bucket_messages(pp_rank, coordinate, plan)
        rows = [row for message in messages for row in self.rows_of_sum(message, coordinate, plan)]
        rows += inner_sums(pp_rank, coordinate, plan)
        return [*merge(rows), *final_collectives(pp_rank, coordinate, plan)]

    def keeps_gradients(self, plan: Plan) -> bool:
        return True

    def gathered_bytes(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> int:
        """The bytes that compression holds in addition to weights, gradients and optimizer state."""
        return sum(self.compression.held_bytes(parts, plan) for parts in buckets_of(pp_rank, coordinate, plan).parts)

    def saved_bytes(self, plan: Plan) -> int:
        return self.compression.saved_bytes(plan)

    def equivalence(self, plan: Plan) -> Equivalence:
        return self.compression.equivalence(plan)

    def exchange_form(self, plan: Plan) -> ExchangeForm:
        compression = self.compression
        return ExchangeForm(
            compression=compression.kind if compression.compresses else "", can_undo=compression.can_undo
        )
