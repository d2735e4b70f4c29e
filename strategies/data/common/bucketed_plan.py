"""The base class of strategies with complete copies, whose gradients are all-reduced in buckets during backward.

Gradients of experts that are distributed over ep are summed over `expert_dp`, in buckets of their own. Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from parallelrun.errors import Problem
from parallelrun.plan import data_cost
from parallelrun.plan.data_strategy import DataStrategy, ExchangeForm
from parallelrun.plan.prediction import merge
from parallelrun.plan.request import Request
from parallelrun.plan.structure import Collective, Equivalence, Plan

from . import buckets
from .compression import plan as compressions
from .compression.plan import Compression, SummedMessage
from .keys import BucketKeys

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class BucketedAllReduce(DataStrategy):
    """Every rank of dp holds its stage's complete weights, gradients and optimizer state."""

    takes_experts = True
    keeps_gradients = True

    compression: Compression = field(default_factory=Compression)

    @classmethod
    def check(cls, request: Request) -> list[Problem]:
        return compressions.check(request)

    @classmethod
    def resolve(cls, request: Request) -> Self:
        bucket_bytes = BucketKeys.of(request.config).bucket_bytes
        return cls(bucket_bytes=bucket_bytes, compression=compressions.of(request.config))

    def backward_bytes(self, stage: int, number: int, coordinate: dict[str, int], plan: Plan) -> list[int] | None:
        """The gradients that no bucket has collected yet: all of them where buckets wait for the schedule's end."""
        if plan.pipeline.splits_backward:
            return None
        filled = partial(buckets.partition, plan=plan)
        waiting = buckets.WaitingGradients(plan.stages[stage].pp_rank, coordinate, plan, filled)
        return [beside for beside, _ in waiting.of_stage(stage)]

    def bucket_messages(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> list[SummedMessage]:
        """Every sum of one step, in the order in which the buckets are sent."""
        return [
            replace(message, axis=bucket.axis)
            for bucket in buckets.contents(pp_rank, coordinate, plan)
            for message in compressions.messages(bucket.parts, plan, self.compression)
        ]

    def rows_of_sum(self, message: SummedMessage, coordinate: dict[str, int], plan: Plan) -> list[Collective]:
        """The messages of one sum. Override this to change the all-reduce algorithm."""
        return [Collective(message.axis, "all_reduce", "gradients", 1, message.payload_bytes)]

    def collectives(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> list[Collective]:
        messages = self.bucket_messages(pp_rank, coordinate, plan)
        rows = [row for message in messages for row in self.rows_of_sum(message, coordinate, plan)]
        return merge(rows) + buckets.final_collectives(pp_rank, coordinate, plan)

    def gathered_bytes(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> int:
        """What compression holds beside weights, gradients and optimizer state."""
        contents = buckets.contents(pp_rank, coordinate, plan)
        return sum(compressions.held_bytes(bucket.parts, plan, self.compression) for bucket in contents)

    def exchange_form(self, plan: Plan) -> ExchangeForm:
        kind = self.compression.kind
        return ExchangeForm(data_cost.RING, compression=kind if kind != "none" else "")

    def equivalence(self, plan: Plan) -> Equivalence:
        return compressions.equivalence(plan, self.compression)
