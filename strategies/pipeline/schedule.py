"""The base class of the schedules: what they send and hold, from the order of their actions."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import ClassVar

from parallelrun.base.errors import Problem
from parallelrun.base.precision import BYTES
from parallelrun.planner.contract.collective import Collective
from parallelrun.planner.contract.messages import (
    ExplainedExchange,
    ExplainedMessage,
    ExplainedRound,
    Explanation,
    ranks_over,
)
from parallelrun.planner.contract.pipeline_schedule import Action, PipelineSchedule
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.contract.request import Request
from parallelrun.planner.predict import simulate

from . import messages, orders
from .orders import Orders


@dataclass(frozen=True)
class Schedule(PipelineSchedule):
    """Base of all schedules, which differ in the order of actions and in their checks.

    explained: the schedule in sentences, and its paper, for `parallelrun explain`.
    """

    explained: ClassVar[tuple[str, str]]

    @staticmethod
    @abstractmethod
    def rank_order(rank: int, pp: int, virtual_stages: int, num_microbatches: int) -> orders.Order:
        """Return the actions of one pp rank."""

    def order_of_ranks(self, plan: Plan) -> orders.RankOrder:
        """Return `rank_order`, or the form of it for this plan."""
        return self.rank_order

    @classmethod
    def forward_only(cls, pp: int, virtual_stages: int, num_microbatches: int) -> Orders:
        """Return an order of forward passes alone, for evaluation."""
        return orders.forward_only(cls.stages_of_ranks(pp, virtual_stages), pp, num_microbatches)

    @classmethod
    def stages_of_ranks(cls, pp: int, virtual_stages: int) -> list[list[int]]:
        """Return the stage indices of every pp rank."""
        stages = range(pp * virtual_stages)
        return [[stage for stage in stages if cls.pp_rank(stage, pp) == rank] for rank in range(pp)]

    @classmethod
    def check(cls, request: Request) -> list[Problem]:
        lookups = request.spec.mtp_depth and request.spec.mtp_depth + request.config.model.tied_embeddings
        if cls.splits_backward and lookups > 1:  # torch runs the graph between two uses of a weight once for each
            message = f"schedule={cls.kind}: the last stage uses the embedding {lookups} times (model.mtp_depth)"
            fix = "model.mtp_depth=1 model.tied_embeddings=false, or schedule=1f1b"
            return [Problem(message, "schedule", fix, kind="not_built")]
        if request.virtual_stages == 1 or cls.takes_virtual_stages:
            return cls.check_microbatches(request)
        message = f"virtual_stages={request.virtual_stages}: {cls.kind} runs one stage per rank"
        fix = "virtual_stages=1, or schedule=interleaved"
        return [Problem(message, "virtual_stages", fix, kind="undefined"), *cls.check_microbatches(request)]

    @classmethod
    def check_microbatches(cls, request: Request) -> list[Problem]:
        """Return the violations that depend on the batch; none while the batch does not divide."""
        return []

    def actions(self, plan: Plan) -> Orders:
        size = plan.mesh.size("pp"), self.virtual_stages, plan.batch.microbatches
        return orders.of_ranks(self.order_of_ranks(plan), *size)

    def order(self, plan: Plan, pp_rank: int) -> orders.Order:
        size = plan.mesh.size("pp"), self.virtual_stages, plan.batch.microbatches
        return orders.of_rank(self.order_of_ranks(plan), pp_rank, *size)

    def steps(self, plan: Plan) -> messages.Steps:
        """Return the actions and messages of every pp rank in the order in which the runtime executes them."""
        return _steps(self, self.order_of_ranks(plan), plan.mesh.size("pp"), plan.batch.microbatches)

    def live_bytes(self, plan: Plan, pp_rank: int, kept: Mapping[int, int]) -> list[tuple[Action, int]]:
        walk = self.walk(plan, pp_rank, kept)
        return [
            (Action(kind, stage, number), before)
            for (kind, stage, number, _), before, _ in walk
            if kind in messages.ACTIONS
        ]

    def walk(self, plan: Plan, pp_rank: int, kept: Mapping[int, int]) -> Iterator[tuple[messages.Step, int, int]]:
        """Yield a rank's steps, each with the bytes held when it begins and the most bytes held during it."""
        touched = {index for stage in plan.stages_of(pp_rank) for index in (stage.index, stage.index + 1)}
        inputs = {index: boundary_bytes(plan, index) for index in touched if 0 < index < len(plan.stages)}
        return messages.live_bytes(self.steps(plan)[pp_rank], kept, inputs)

    def collectives(self, pp_rank: int, plan: Plan) -> list[Collective]:
        """Each microbatch crosses each cut between ranks once each way.

        torch's schedules exchange nothing else after their first step, given static metadata (a test counts it).
        """
        last = len(plan.stages) - 1
        holder = [stage.pp_rank for stage in plan.stages]
        mine = [stage.index for stage in plan.stages_of(pp_rank)]
        to_next = [s + 1 for s in mine if s < last and holder[s + 1] != pp_rank]
        from_previous = [s for s in mine if s > 0 and holder[s - 1] != pp_rank]
        m = plan.batch.microbatches
        forward, backward = (m * sum(boundary_bytes(plan, s) for s in cuts) for cuts in (to_next, from_previous))
        rows = [
            Collective("pp", "send", "activations", m * len(to_next), forward),
            Collective("pp", "recv", "activations", m * len(from_previous), 0),
            Collective("pp", "send", "gradients", m * len(from_previous), backward),
            Collective("pp", "recv", "gradients", m * len(to_next), 0),
        ]
        return [row for row in rows if row.calls]

    def explain(self, plan: Plan) -> Explanation:
        """Return the messages between the stages of rank 0's pipeline, in the order of a simulated step."""
        ranks, last, run = ranks_over(plan, "pp"), len(plan.stages) - 1, simulate.of_schedule(plan)
        sent: dict[float, list[ExplainedMessage]] = {}
        for pp_rank, order in enumerate(run.orders):
            for action, ended in zip(order, run.ends[pp_rank], strict=True):
                step = {"F": 1, "B": -1, "I": -1, "W": 0}[action.kind]
                to = action.stage + step
                if not step or not 0 <= to <= last or plan.stages[to].pp_rank == pp_rank:
                    continue
                content, purpose = ("activations", "activations") if step > 0 else ("their gradients", "gradients")
                size = boundary_bytes(plan, max(action.stage, to))
                label = f"{content} of microbatch {action.microbatch}, stage {action.stage} to {to}"
                message = ExplainedMessage(ranks[pp_rank], ranks[plan.stages[to].pp_rank], label, size, purpose)
                sent.setdefault(round(ended, 6), []).append(message)
        rounds = tuple(ExplainedRound(f"at {moment:g} forward times", tuple(sent[moment])) for moment in sorted(sent))
        bubble = f"{run.bubble_of_total:.0%} of the step is bubble where all stages take equal time."
        title = f"one step of {plan.batch.microbatches} microbatches on {len(ranks)} ranks"
        sentences, paper = self.explained
        exchange, groups = ExplainedExchange(title, rounds), plan.mesh.num_ranks // len(ranks)
        return Explanation("pipeline", self.kind, f"{sentences} {bubble}", paper, ranks, groups, "pp", (exchange,))


@lru_cache(maxsize=16)
def _steps(schedule: Schedule, order: orders.RankOrder, pp: int, num_microbatches: int) -> messages.Steps:
    actions = orders.of_ranks(order, pp, schedule.virtual_stages, num_microbatches)
    num_stages = pp * schedule.virtual_stages
    return messages.with_messages(actions, schedule.pp_rank, num_stages, schedule.overlaps_passes)


def boundary_shape(plan: Plan, stage: int) -> tuple[int, ...]:
    """Return the local shape of the input of stage `stage` (from 1) for one microbatch.

    The stage's first block may name its input's shape; otherwise it is the tensor strategy's shape between blocks.
    """
    first = plan.spec.block(plan.stages[stage].blocks[0])
    return plan.tensor.boundary_shape(plan) if first.input_shape is None else plan.input_shape(first)


def boundary_bytes(plan: Plan, stage: int) -> int:
    """Return the bytes that one rank sends to stage `stage` for one microbatch."""
    return prod(boundary_shape(plan, stage)) * BYTES[plan.precision.compute]
