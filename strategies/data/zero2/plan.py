"""The plan of zero2: gradients are reduced in every backward pass, so that a rank keeps only its part of them.

Schedules that split backward (zero bubble) keep complete gradients until they end: there, traffic is that of zero1.
"""

from __future__ import annotations

from dataclasses import dataclass

from parallelrun.base.layout import Layout
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.model.model_spec import ParameterSpec

from ..common.bucket_prediction import RankBuckets, buckets_of
from ..common.buckets import MAX_PENDING
from ..common.keys import ZeRO2Config
from ..common.zero_plan import ZeRO, received_bytes


@dataclass(frozen=True)
class ZeRO2(ZeRO):
    """Weights are complete on every rank of dp; gradients, optimizer state and the update are sharded."""

    kind = "zero2"
    is_searched = True
    config_class = ZeRO2Config

    def num_exchanges(self, plan: Plan) -> int:
        return 1 if plan.pipeline.splits_backward else plan.batch.microbatches

    def gradient_layout(self, parameter: ParameterSpec, tensor_layout: Layout, plan: Plan) -> Layout:
        return self.state_layout(parameter, tensor_layout, plan)

    def backward_bytes(self, stage: int, number: int, coordinate: dict[str, int], plan: Plan) -> list[int] | None:
        """The gradients that no bucket holds yet, and the pending buckets, those of earlier passes included."""
        buckets = buckets_of(plan.stages[stage].pp_rank, coordinate, plan)
        own = [bucket for bucket, parts in enumerate(buckets.parts) if parts[0][0].stage == stage]
        # (bucket, is its sum added to earlier ones?): where buckets are few, those of two passes before are pending too
        started = [(bucket, before > 0) for before in range(max(0, number - MAX_PENDING), number) for bucket in own]
        sizes = []
        for outside, full in buckets.waiting(stage):
            pending = [*started, *((bucket, number > 0) for bucket in full if bucket in own)][-MAX_PENDING:]
            sizes.append(outside + sum(_pending_bytes(*bucket, buckets, plan) for bucket in pending))
        return sizes

    def ending_bytes(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> int:
        """The last pending buckets. Where backward is split, all are sent after the schedule."""
        buckets, last = buckets_of(pp_rank, coordinate, plan), plan.batch.microbatches - 1
        if plan.pipeline.splits_backward:
            return _split_backward_bytes(buckets, plan)
        sizes = [
            _pending_bytes(bucket, number > 0, buckets, plan)
            for number in range(max(0, last - MAX_PENDING + 1), last + 1)
            for bucket in range(len(buckets.axes))
        ]
        return sum(sizes[-MAX_PENDING:])


def _split_backward_bytes(buckets: RankBuckets, plan: Plan) -> int:
    """Bytes in addition to the complete gradients at the peak of the exchanges after a schedule. A bucket's gradients
    are freed once its buffer is filled. A stage's exchanges have ended before the next one's begin."""
    most, freed, stage = 0, 0, -1
    pending: list[int] = []
    for number, parts in enumerate(buckets.parts):
        if parts[0][0].stage != stage:
            stage, pending = parts[0][0].stage, []
        most = max(most, sum(pending[1 - MAX_PENDING :]) + buckets.sent_bytes(number) - freed)
        freed += buckets.sent_bytes(number, padded=False)
        pending.append(_pending_bytes(number, False, buckets, plan))
        most = max(most, sum(pending[-MAX_PENDING:]) - freed)
    return most


def _pending_bytes(number: int, again: bool, buckets: RankBuckets, plan: Plan) -> int:
    """A bucket while it is reduced: its buffer, over gloo the receive buffer (`comm`), and the sum of later passes."""
    sent = buckets.sent_bytes(number)
    total = sent // plan.mesh.size(buckets.axes[number]) if again else 0
    return sent + received_bytes(number, buckets, plan) + total
