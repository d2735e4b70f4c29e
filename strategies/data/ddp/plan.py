"""Data parallel with whole copies: gradients are summed over dp in buckets, under backward.

Gradients of experts that are spread over ep are summed over `expert_dp`, in buckets of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Self

from parallelrun.errors import Problem
from parallelrun.plan import data_cost
from parallelrun.plan.data_strategy import ExchangeForm
from parallelrun.plan.parameters import held_parameters
from parallelrun.plan.prediction import merge
from parallelrun.plan.request import Request
from parallelrun.plan.structure import Collective, Equivalence, Plan

from .. import buckets
from ..compression import settings as compression
from ..compression.settings import CompressedStrategy, Message
from ..waiting import Waiting


@dataclass(frozen=True)
class DDP(CompressedStrategy):
    """Every rank of dp holds all of its stage's weights, gradients and optimizer state."""

    kind = "ddp"
    reads: ClassVar[tuple[str, ...]] = ("bucket_mb", *compression.KEYS)
    takes_experts = True
    keeps_gradients = True
    description = (
        "Each rank computes the gradients of its own samples. Backward fills buckets from the last layer to the first; "
        "a full bucket is summed over the replicas by one all-reduce while the rest of backward runs.",
        "Li et al. 2020 (PyTorch Distributed)",
    )

    @classmethod
    def check(cls, request: Request) -> list[Problem]:
        return compression.check(request)

    @classmethod
    def resolve(cls, request: Request) -> Self:
        data = request.config.strategy.data
        return cls(bucket_bytes=int(data.bucket_mb * 2**20), compression=compression.of(request.config))

    def backward_bytes(self, stage: int, number: int, coordinate: dict[str, int], plan: Plan) -> list[int] | None:
        """Gradients that no bucket has collected yet: all of them where buckets wait for the schedule's end."""
        if plan.pipeline.splits_backward:
            return None
        pp_rank = plan.stages[stage].pp_rank
        filled = partial(buckets.partition, plan=plan)
        return [beside for beside, _ in Waiting(pp_rank, coordinate, plan, filled).of_stage(stage)]

    def collectives(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> list[Collective]:
        """The sums of every bucket, then what the final gradients need (partial axes, tied copies)."""
        messages = self.bucket_messages(pp_rank, coordinate, plan)
        out = merge([row for message in messages for row in self.rows_of_sum(message, coordinate, plan)])
        layouts = [(held, held.layout) for held in held_parameters(plan, pp_rank)]
        return out + buckets.final_collectives(layouts, coordinate, plan)

    def gathered_bytes(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> int:
        """What compression holds beside weights, gradients and optimizer state."""
        contents = buckets.contents(pp_rank, coordinate, plan)
        return sum(compression.held_bytes(bucket.parts, plan, self.compression) for bucket in contents)

    def rows_of_sum(self, message: Message, coordinate: dict[str, int], plan: Plan) -> list[Collective]:
        """The messages of one sum. Override this to change the all-reduce algorithm."""
        return [Collective(message.axis, "all_reduce", "gradients", 1, message.payload_bytes)]

    def exchange_form(self, plan: Plan) -> ExchangeForm:
        compressed = self.compression.kind != "none"
        return ExchangeForm(data_cost.RING, compression=self.compression.kind if compressed else "")

    def equivalence(self, plan: Plan) -> Equivalence:
        return compression.equivalence(plan, self.compression)

    def bucket_messages(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> list[Message]:
        """Every sum of one step, in the order in which the buckets are sent."""
        return [
            replace(message, axis=bucket.axis)
            for bucket in buckets.contents(pp_rank, coordinate, plan)
            for message in compression.messages(bucket.parts, plan, self.compression)
        ]
