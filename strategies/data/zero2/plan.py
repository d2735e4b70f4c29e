"""ZeRO stage 2 (Rajbhandari et al. 2020): as stage 1, and every rank of dp keeps only its part of the gradients.

So gradients are reduced in every backward pass, not once a step: with m microbatches m times zero1's volume for them,
the price of never holding whole gradients (under pipelines too, where m is large). Schedules that compute weight
gradients apart from backward (zero bubble) leave whole gradients until they are done: there it is stage 1's traffic
and memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from parallelrun.layout import Layout
from parallelrun.model_spec import ParameterSpec
from parallelrun.plan import data_cost
from parallelrun.plan.data_strategy import ExchangeForm
from parallelrun.plan.parameters import HeldParameter, held_parameters
from parallelrun.plan.structure import Collective, Plan

from .. import buckets
from ..waiting import Waiting
from ..zero1 import plan as zero1

UNDER_WAY = 2  # buckets whose reduction is not waited for yet: one is sent while the next one fills


@dataclass(frozen=True)
class ZeRO2(zero1.ZeRO1):
    """Weights are whole on every rank of dp; gradients, optimizer state and the update are split."""

    kind = "zero2"

    def gradient_layout(self, parameter: ParameterSpec, tensor_layout: Layout, plan: Plan) -> Layout:
        """Shards; whole under schedules whose gradients come after them."""
        whole = plan.pipeline.splits_backward
        return tensor_layout if whole else self.state_layout(parameter, tensor_layout, plan)

    def held_bytes(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> int:
        """This rank's shards, beside the whole gradients that a split backward leaves."""
        if not plan.pipeline.splits_backward:
            return 0
        waiting = Waiting(pp_rank, coordinate, plan, partial(_flat_buckets, plan=plan))
        return sum(waiting.sent_bytes(i) // plan.mesh.size(one.axis) for i, one in enumerate(waiting.buckets))

    def backward_bytes(self, stage: int, number: int, coordinate: dict[str, int], plan: Plan) -> list[int] | None:
        """Gradients that no bucket holds yet, and the last buckets on their way, those of passes before included."""
        waiting = Waiting(plan.stages[stage].pp_rank, coordinate, plan, partial(_flat_buckets, plan=plan))
        if plan.pipeline.splits_backward:  # nothing is reduced before the schedule is done
            return [0] * len(plan.stages[stage].blocks)
        of_stage = waiting.of_stage(stage)
        own = [number for number, one in enumerate(waiting.buckets) if waiting.stage_of(one) == stage]
        # (bucket, is its sum added to earlier ones?): with few buckets, those of two passes before are still under way
        started = [(one, before > 0) for before in range(max(0, number - UNDER_WAY), number) for one in own]
        return [
            beside
            + sum(_under_way(*one, waiting, plan) for one in [*started, *((x, number > 0) for x in full)][-UNDER_WAY:])
            for beside, full in ((beside, [x for x in full if x in own]) for beside, full in of_stage)
        ]

    def ending_bytes(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> int:
        """The last buckets on their way; all at once where the schedule leaves them to its end."""
        waiting = Waiting(pp_rank, coordinate, plan, partial(_flat_buckets, plan=plan))
        last = plan.batch.microbatches - 1
        sizes = [
            _under_way(number, passed > 0, waiting, plan)
            for passed in range(max(0, last - UNDER_WAY + 1), last + 1)
            for number in range(len(waiting.buckets))
        ]
        return sum(sizes[-UNDER_WAY:])

    def exchange_form(self, plan: Plan) -> ExchangeForm:
        return ExchangeForm(data_cost.SCATTERED_AGAIN if reductions(plan) > 1 else data_cost.SHARDED)

    def collectives(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> list[Collective]:
        """Per bucket a reduce-scatter in every backward pass and one all-gather of parameters, then the final sums."""
        trained = buckets.trained_parameters(plan, pp_rank)
        of_stages = stage_buckets(trained, buckets.local_shapes(trained, coordinate, plan), plan)
        filled = [bucket for of_stage in of_stages for bucket in of_stage]
        sent = zero1.exchanges(filled, trained, coordinate, plan, reductions(plan))
        layouts = [(held, self.state_layout(held.spec, held.layout, plan)) for held in held_parameters(plan, pp_rank)]
        return sent + buckets.final_collectives(layouts, coordinate, plan)


def _flat_buckets(trained: list[HeldParameter], shapes: list[tuple[int, ...]], plan: Plan) -> list[buckets.Filled]:
    return [bucket for of_stage in stage_buckets(trained, shapes, plan) for bucket in of_stage]


def _under_way(number: int, again: bool, waiting: Waiting, plan: Plan) -> int:
    """A bucket while it is reduced: its buffer, over gloo what is received (`comm`), and the sum of later passes."""
    sent = waiting.sent_bytes(number)
    total = sent // plan.mesh.size(waiting.buckets[number].axis) if again else 0
    return sent + (sent if plan.device == "cpu" else 0) + total


def reductions(plan: Plan) -> int:
    """How often a step reduces every bucket of gradients."""
    return 1 if plan.pipeline.splits_backward else plan.batch.microbatches


def stage_buckets(
    trained: list[HeldParameter], shapes: list[tuple[int, ...]], plan: Plan
) -> list[list[buckets.Filled]]:
    """The buckets of `trained`, per stage of a rank, the last stage first.

    No bucket spans two stages: their backward passes alternate, and a bucket is reduced once in each pass.
    """
    filled = []
    for stage in sorted({parameter.stage for parameter in trained}, reverse=True):
        own = [index for index, parameter in enumerate(trained) if parameter.stage == stage]
        inside = buckets.partition([trained[i] for i in own], [shapes[i] for i in own], plan, padded=True)
        filled.append([buckets.Filled(one.axis, tuple(own[place] for place in one.indices)) for one in inside])
    return filled
