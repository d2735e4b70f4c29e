"""The plan of zero1: gradients are reduced once a step, in buckets that a rank keeps."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from parallelrun.planner.contract.plan import Plan

from ..common.bucket_prediction import buckets_of
from ..common.keys import ZeRO1Config
from ..common.zero_plan import ZeRO, received_bytes


@dataclass(frozen=True)
class ZeRO1(ZeRO):
    """Weights and gradients are complete on every rank of dp."""

    kind = "zero1"
    is_searched = True
    saves_memory = True
    config_class = ZeRO1Config

    def held_bytes(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> int:
        """Each bucket's padding and its sum, of which this rank keeps its part."""
        buckets = buckets_of(pp_rank, coordinate, plan)
        return sum(
            buckets.sent_bytes(number)
            + buckets.sent_bytes(number) // plan.mesh.size(axis)
            - buckets.sent_bytes(number, padded=False)
            for number, axis in enumerate(buckets.axes)
        )

    def backward_bytes(self, stage: int, number: int, coordinate: dict[str, int], plan: Plan) -> list[int] | None:
        """The gradients that no bucket has collected; in the last pass, also the receive buffers of full buckets."""
        buckets = buckets_of(plan.stages[stage].pp_rank, coordinate, plan)
        is_last = number == plan.batch.microbatches - 1
        return [
            outside + (sum(received_bytes(bucket, buckets, plan) for bucket in full) if is_last else 0)
            for outside, full in buckets.waiting(stage)
        ]

    def ending_bytes(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> int:
        """The receive buffers of all buckets. Where backward is split, each comes after its bucket's gradients."""
        buckets = buckets_of(pp_rank, coordinate, plan)
        received = [received_bytes(number, buckets, plan) for number in range(len(buckets.axes))]
        if not plan.pipeline.splits_backward:
            return sum(received)
        taken = [buckets.sent_bytes(number, padded=False) for number in range(len(buckets.axes))]
        return max((0, *accumulate(more - less for more, less in zip(received, taken))))
