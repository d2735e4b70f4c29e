"""The plan of zero2: as zero1, but a rank keeps only its part of the gradients.

So gradients are reduced in every backward pass and not once a step: with m microbatches their volume is m times
zero1's, the price of never holding complete gradients. Schedules that compute weight gradients apart from backward
(zero bubble) keep complete gradients until they end: there, traffic and memory are those of zero1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parallelrun.layout import Layout
from parallelrun.model_spec import ParameterSpec
from parallelrun.plan import data_cost
from parallelrun.plan.data_strategy import ExchangeForm
from parallelrun.plan.parameters import HeldParameter
from parallelrun.plan.structure import Plan

from ..common import buckets
from ..common.buckets import Filled, Shape, WaitingGradients
from ..common.keys import BucketKeys
from ..common.zero_plan import ZeRO

MAX_PENDING = 2  # exchanges that have not ended: one bucket is sent while the next one fills


@dataclass
class ZeRO2Config(BucketKeys):
    """Keys of `strategy.data` with kind=zero2."""

    kind: str = "zero2"


@dataclass(frozen=True)
class ZeRO2(ZeRO):
    """Weights are complete on every rank of dp; gradients, optimizer state and the update are sharded."""

    kind = "zero2"
    config_class = ZeRO2Config
    description = (
        "Each rank owns a part of every tensor's gradient and optimizer state. In every backward pass a reduce-scatter "
        "gives it the summed gradients of its part; it updates that part, and an all-gather gives every rank the new "
        "weights.",
        "Rajbhandari et al. 2020",
    )

    def fill(self, trained: Sequence[HeldParameter], shapes: Sequence[Shape], plan: Plan) -> list[Filled]:
        """The last stage of a rank first. No bucket spans two stages: their backward passes alternate."""
        filled = []
        for stage in sorted({parameter.stage for parameter in trained}, reverse=True):
            own = [index for index, parameter in enumerate(trained) if parameter.stage == stage]
            inside = buckets.partition([trained[i] for i in own], [shapes[i] for i in own], plan, padded=True)
            filled += [Filled(one.axis, tuple(own[i] for i in one.indices)) for one in inside]
        return filled

    def reductions(self, plan: Plan) -> int:
        return 1 if plan.pipeline.splits_backward else plan.batch.microbatches

    def gradient_layout(self, parameter: ParameterSpec, tensor_layout: Layout, plan: Plan) -> Layout:
        unsharded = plan.pipeline.splits_backward
        return tensor_layout if unsharded else self.state_layout(parameter, tensor_layout, plan)

    def held_bytes(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> int:
        """This rank's shards, beside the unsharded gradients that a split backward keeps."""
        if not plan.pipeline.splits_backward:
            return 0
        waiting = self.waiting(pp_rank, coordinate, plan)
        return sum(waiting.sent_bytes(i) // plan.mesh.size(one.axis) for i, one in enumerate(waiting.buckets))

    def backward_bytes(self, stage: int, number: int, coordinate: dict[str, int], plan: Plan) -> list[int] | None:
        """The gradients that no bucket holds yet, and the pending buckets, those of earlier passes included."""
        if plan.pipeline.splits_backward:  # nothing is reduced before the schedule ends
            return [0] * len(plan.stages[stage].blocks)
        waiting = self.waiting(plan.stages[stage].pp_rank, coordinate, plan)
        own = [bucket for bucket in range(len(waiting.buckets)) if waiting.stage_of(bucket) == stage]
        # (bucket, is its sum added to earlier ones?): where buckets are few, those of two passes before are pending too
        started = [(bucket, before > 0) for before in range(max(0, number - MAX_PENDING), number) for bucket in own]
        found = []
        for beside, full in waiting.of_stage(stage):
            pending = [*started, *((bucket, number > 0) for bucket in full if bucket in own)][-MAX_PENDING:]
            found.append(beside + sum(_pending_bytes(*one, waiting, plan) for one in pending))
        return found

    def ending_bytes(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> int:
        """The last pending buckets; all are sent after the schedule where it splits backward."""
        waiting = self.waiting(pp_rank, coordinate, plan)
        last = plan.batch.microbatches - 1
        sizes = [
            _pending_bytes(bucket, number > 0, waiting, plan)
            for number in range(max(0, last - MAX_PENDING + 1), last + 1)
            for bucket in range(len(waiting.buckets))
        ]
        return sum(sizes[-MAX_PENDING:])

    def exchange_form(self, plan: Plan) -> ExchangeForm:
        return ExchangeForm(data_cost.SCATTERED_AGAIN if self.reductions(plan) > 1 else data_cost.SHARDED)


def _pending_bytes(number: int, again: bool, waiting: WaitingGradients, plan: Plan) -> int:
    """A bucket while it is reduced: its buffer, over gloo the receive buffer (`comm`), and the sum of later passes."""
    sent = waiting.sent_bytes(number)
    total = sent // plan.mesh.size(waiting.buckets[number].axis) if again else 0
    return sent + (sent if plan.device == "cpu" else 0) + total
