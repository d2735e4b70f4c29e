"""ZeRO stage 2 (Rajbhandari et al. 2020): as stage 1, and every rank of dp keeps only its part of the gradients.

So gradients are reduced in every backward pass, not once a step: with m microbatches m times zero1's volume for them,
the price of never holding whole gradients (under pipelines too, where m is large). Schedules that compute weight
gradients apart from backward (zero bubble) leave whole gradients until they are done: there it is stage 1's traffic
and memory.
"""

from __future__ import annotations

from parallelrun.errors import Problem
from parallelrun.layout import Layout
from parallelrun.models.spec import ParameterSpec
from parallelrun.plan.structure import Collective, Plan
from parallelrun.plan.ways import Request
from parallelrun.train.parameters import HeldParameter, held_parameters

from .. import buckets
from ..sharding import check_splits
from ..zero1 import plan as zero1


class Way(zero1.Way):
    """Weights are whole on every rank of dp; gradients, optimizer state and the update are split."""

    def check(self, request: Request) -> list[Problem]:
        return check_splits(request, "zero2")

    def gradient_layout(self, parameter: ParameterSpec, tensor_layout: Layout, plan: Plan) -> Layout:
        """Shards; whole under schedules whose gradients come after them."""
        whole = plan.pipeline.splits_backward
        return tensor_layout if whole else self.state_layout(parameter, tensor_layout, plan)

    def collectives(self, position: int, coordinate: dict[str, int], plan: Plan) -> list[Collective]:
        """Per bucket a reduce-scatter in every backward pass and one all-gather of parameters, then the final sums."""
        trained = buckets.trained_parameters(plan, position)
        of_stages = stage_buckets(trained, buckets.local_shapes(trained, coordinate, plan), plan)
        filled = [bucket for of_stage in of_stages for bucket in of_stage]
        sent = zero1.exchanges(filled, trained, coordinate, plan, reductions(plan))
        layouts = [(held, self.state_layout(held.spec, held.layout, plan)) for held in held_parameters(plan, position)]
        return sent + buckets.final_collectives(layouts, coordinate, plan)


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
