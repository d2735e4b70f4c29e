"""The plan of zero1: gradients are reduced once a step, in buckets that a rank keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parallelrun.plan import data_cost
from parallelrun.plan.data_strategy import ExchangeForm
from parallelrun.plan.parameters import HeldParameter
from parallelrun.plan.structure import Plan

from ..common import buckets
from ..common.buckets import Filled, Shape, WaitingGradients
from ..common.keys import BucketKeys
from ..common.zero_plan import ZeRO


@dataclass
class ZeRO1Config(BucketKeys):
    """Keys of `strategy.data` with kind=zero1."""

    kind: str = "zero1"


@dataclass(frozen=True)
class ZeRO1(ZeRO):
    """Weights and gradients are complete on every rank of dp."""

    kind = "zero1"
    saves_memory = True
    config_class = ZeRO1Config
    description = (
        "Each rank owns a part of every tensor's optimizer state. A reduce-scatter gives it the summed gradients of "
        "its part, it updates that part, and an all-gather gives every rank the new weights.",
        "Rajbhandari et al. 2020",
    )

    def fill(self, trained: Sequence[HeldParameter], shapes: Sequence[Shape], plan: Plan) -> list[Filled]:
        return buckets.partition(trained, shapes, plan, padded=True)

    def held_bytes(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> int:
        """Each bucket's padding and its sum, of which this rank keeps its part."""
        waiting = self.waiting(pp_rank, coordinate, plan)
        return sum(
            waiting.sent_bytes(number)
            + waiting.sent_bytes(number) // plan.mesh.size(bucket.axis)
            - waiting.sent_bytes(number, padded=False)
            for number, bucket in enumerate(waiting.buckets)
        )

    def backward_bytes(self, stage: int, number: int, coordinate: dict[str, int], plan: Plan) -> list[int] | None:
        """The gradients that no bucket has collected yet, all of them where buckets wait for the schedule's end; in
        the last pass, also the receive buffers of full buckets."""
        if plan.pipeline.splits_backward:
            return None
        waiting = self.waiting(plan.stages[stage].pp_rank, coordinate, plan)
        is_last = number == plan.batch.microbatches - 1
        return [
            beside + (sum(_received_bytes(one, waiting, plan) for one in full) if is_last else 0)
            for beside, full in waiting.of_stage(stage)
        ]

    def ending_bytes(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> int:
        """The receive buffers of all buckets."""
        waiting = self.waiting(pp_rank, coordinate, plan)
        return sum(_received_bytes(number, waiting, plan) for number in range(len(waiting.buckets)))

    def exchange_form(self, plan: Plan) -> ExchangeForm:
        return ExchangeForm(data_cost.SHARDED)


def _received_bytes(number: int, waiting: WaitingGradients, plan: Plan) -> int:
    """Bytes that a bucket's reduce-scatter over gloo receives before it sums them (`comm`)."""
    return waiting.sent_bytes(number) if plan.device == "cpu" else 0
