"""The pipeline schedules: what each allows, in which order it computes, and what it sends and holds. Torch-free."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import ClassVar

from parallelrun.errors import Problem
from parallelrun.plan import simulate
from parallelrun.plan.messages import ExplainedExchange, ExplainedMessage, ExplainedRound, Explanation, ranks_over
from parallelrun.plan.pipeline_schedule import Action, PipelineSchedule
from parallelrun.plan.request import Request
from parallelrun.plan.structure import Collective, Plan
from parallelrun.precision import BYTES

from . import messages, orders
from .orders import Orders


@dataclass(frozen=True)
class Schedule(PipelineSchedule):
    """What all schedules share; they differ in the order of actions, in how messages are posted, and in their checks.

    explained: the schedule in sentences, and its paper, for `parallelrun explain`.
    """

    explained: ClassVar[tuple[str, str]] = ("", "")

    @classmethod
    @abstractmethod
    def orders(cls, pp: int, virtual_stages: int, num_microbatches: int) -> Orders:
        """Return the actions of every pp rank."""

    @classmethod
    def steps_of(cls, actions: Orders, virtual_stages: int) -> messages.Steps:
        """Return the actions of every pp rank with the messages between them."""
        return messages.with_messages(actions, cls.pp_rank, len(actions) * virtual_stages)

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
        if request.virtual_stages == 1 or cls.takes_virtual_stages:
            return cls.check_microbatches(request)
        what = f"virtual_stages={request.virtual_stages}: {cls.kind} runs one stage per rank"
        fix = "virtual_stages=1, or schedule=interleaved"
        return [Problem(what, "virtual_stages", fix, kind="undefined"), *cls.check_microbatches(request)]

    @classmethod
    def check_microbatches(cls, request: Request) -> list[Problem]:
        """Return the violations that depend on the batch; none while the batch does not divide."""
        return []

    def actions(self, plan: Plan) -> list[list[Action]]:
        size = plan.mesh.size("pp"), self.virtual_stages, plan.batch.microbatches
        return [list(order) for order in self.orders(*size)]

    def steps(self, plan: Plan) -> messages.Steps:
        """Return the actions and messages of every pp rank in the order in which the runtime executes them."""
        return _steps(self, plan.mesh.size("pp"), plan.batch.microbatches)

    def live_bytes(self, plan: Plan, pp_rank: int, kept: Mapping[int, int]) -> list[tuple[Action, int]]:
        walk = self.walk(plan, pp_rank, kept)
        return [(Action(*step[:3]), before) for step, before, _ in walk if step.kind in messages.ACTIONS]

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
        ranks, last = ranks_over(plan, "pp"), len(plan.stages) - 1
        run = simulate.of_schedule(plan)
        sent: dict[float, list[ExplainedMessage]] = {}
        for pp_rank, order in enumerate(run.orders):
            for action, ended in zip(order, run.ends[pp_rank], strict=True):
                step = {"F": 1, "B": -1, "I": -1, "W": 0}[action.kind]
                to = action.stage + step
                if not step or not 0 <= to <= last or plan.stages[to].pp_rank == pp_rank:
                    continue
                what, purpose = ("activations", "activations") if step > 0 else ("their gradients", "gradients")
                size = boundary_bytes(plan, max(action.stage, to))
                label = f"{what} of microbatch {action.microbatch}, stage {action.stage} to {to}"
                message = ExplainedMessage(ranks[pp_rank], ranks[plan.stages[to].pp_rank], label, size, purpose)
                sent.setdefault(round(ended, 6), []).append(message)
        rounds = tuple(ExplainedRound(f"at {moment:g} forward times", tuple(sent[moment])) for moment in sorted(sent))
        bubble = f"{run.bubble_of_total:.0%} of the step is bubble where all stages take equal time."
        title = f"one step of {plan.batch.microbatches} microbatches on {len(ranks)} ranks"
        sentences, paper = self.explained
        groups = plan.mesh.num_ranks // len(ranks)
        return Explanation(
            "pipeline",
            self.kind,
            f"{sentences} {bubble}",
            paper,
            ranks,
            groups,
            "pp",
            (ExplainedExchange(title, rounds),),
        )


@lru_cache(maxsize=16)
def _steps(schedule: Schedule, pp: int, num_microbatches: int) -> messages.Steps:
    actions = schedule.orders(pp, schedule.virtual_stages, num_microbatches)
    return schedule.steps_of(actions, schedule.virtual_stages)


@dataclass(frozen=True)
class NoPipeline(Schedule):
    """One stage: microbatches are gradient accumulation, and nothing is sent."""

    kind = "none"
    explained = ("One stage: nothing is sent.", "")

    @classmethod
    def check(cls, request: Request) -> list[Problem]:
        problems = super().check(request)
        if request.pp == 1:
            return problems
        what = f"pp={request.pp}: without a schedule there is one stage"
        return [*problems, Problem(what, "schedule", "schedule=1f1b, or pp=1", kind="undefined")]

    @classmethod
    def orders(cls, pp: int, virtual_stages: int, num_microbatches: int) -> Orders:
        return (tuple(Action(kind, 0, m) for m in range(num_microbatches) for kind in "FB"),)


@dataclass(frozen=True)
class GPipe(Schedule):
    """All forwards, then all backwards: bubble (pp - 1) / (m + pp - 1), all m microbatches in flight."""

    kind = "gpipe"
    explained = (
        "All microbatches go forward through the stages, then all go backward. Every microbatch's activations "
        "are kept.",
        "Huang et al. 2019",
    )

    @classmethod
    def orders(cls, pp: int, virtual_stages: int, num_microbatches: int) -> Orders:
        return orders.gpipe(pp, num_microbatches)

    @classmethod
    def steps_of(cls, actions: Orders, virtual_stages: int) -> messages.Steps:
        return messages.in_turn(actions)


@dataclass(frozen=True)
class NaiveModelParallel(GPipe):
    """GPipe with one microbatch: one rank works at a time, so utilisation is 1 / pp."""

    kind = "naive"
    explained = (
        "The whole batch goes through the stages once, forward and backward: one rank works at a time.",
        "the model parallelism that pipelines improve on",
    )
    takes_microbatches = False

    @classmethod
    def check_microbatches(cls, request: Request) -> list[Problem]:
        if request.batch is None or request.batch.microbatches == 1:
            return []
        what = f"microbatches={request.batch.microbatches}: naive model parallelism has one; with more it is gpipe"
        return [Problem(what, "microbatches", "microbatches=1, or schedule=gpipe", kind="undefined")]


@dataclass(frozen=True)
class OneFOneB(Schedule):
    """1F1B with flush (PipeDream-Flush): GPipe's bubble with at most pp microbatches in flight."""

    kind = "1f1b"
    explained = (
        "After a warm-up, each rank alternates one forward and one backward, so that at most as many "
        "microbatches are kept as there are stages.",
        "Narayanan et al. 2019, 2021 (PipeDream-Flush)",
    )

    @classmethod
    def check_microbatches(cls, request: Request) -> list[Problem]:
        """1F1B needs as many microbatches as stages."""
        if request.batch is None or request.batch.microbatches >= request.pp:
            return []
        samples = request.batch.replica_batch
        enough = [m for m in range(request.pp, samples + 1) if samples % m == 0]
        smallest = f"microbatches={enough[0]}" if enough else f"global_batch={request.pp * request.dp}"
        what = f"microbatches={request.batch.microbatches} are fewer than the pp={request.pp} stages of 1f1b"
        return [Problem(what, "microbatches", f"{smallest}, or schedule=gpipe", kind="undefined")]

    @classmethod
    def orders(cls, pp: int, virtual_stages: int, num_microbatches: int) -> Orders:
        return orders.one_f_one_b(pp, num_microbatches)

    @classmethod
    def steps_of(cls, actions: Orders, virtual_stages: int) -> messages.Steps:
        return messages.joined_in_turn(actions)


@dataclass(frozen=True)
class Interleaved(Schedule):
    """Interleaved 1F1B, as torch's ScheduleInterleaved1F1B: equal rounds of about pp microbatches."""

    kind = "interleaved"
    explained = (
        "As 1F1B, but each rank has several stages, so a microbatch passes every rank several times: more "
        "messages, and a bubble smaller by that factor.",
        "Narayanan et al. 2021",
    )
    takes_virtual_stages = True

    @classmethod
    def check(cls, request: Request) -> list[Problem]:
        if request.pp > 1:
            return super().check(request)
        what = f"pp=1: {cls.kind} orders the stages of several ranks, and there is one"
        return [Problem(what, "pp", "pp=2, or schedule=gpipe", kind="undefined"), *super().check(request)]

    @classmethod
    def check_microbatches(cls, request: Request) -> list[Problem]:
        """Microbatches must form equal rounds."""
        if request.batch is None or request.pp == 1:
            return []
        samples, m = request.batch.replica_batch, request.batch.microbatches
        rounds = orders.num_rounds(request.pp, m)
        if m % rounds == 0:
            return []
        divisors = [n for n in range(1, samples + 1) if samples % n == 0]
        legal = [n for n in divisors if n % orders.num_rounds(request.pp, n) == 0]
        nearest = min(legal, key=lambda n: (abs(n - m), n))
        what = (
            f"microbatches={m} do not make {rounds} equal rounds of about pp={request.pp}, in which "
            f"{cls.kind} goes through a rank's virtual stages"
        )
        return [Problem(what, "microbatches", f"microbatches={nearest}", kind="arithmetic")]

    @classmethod
    def orders(cls, pp: int, virtual_stages: int, num_microbatches: int) -> Orders:
        return orders.interleaved(pp, virtual_stages, num_microbatches)


@dataclass(frozen=True)
class ZeroBubble(Interleaved):
    """ZB1P, as torch's ScheduleInterleavedZeroBubble: weight gradients fill what would be bubble."""

    kind = "zero_bubble"
    explained = (
        "Backward is split: the input gradient is sent on at once, and the weight gradient is computed when "
        "the rank would be idle.",
        "Qi et al. 2023",
    )
    splits_backward = True

    @classmethod
    def default_virtual_stages(cls, pp: int, num_layers: int) -> int:
        """Two, or one where the model has too few layers for two."""
        return 1 if num_layers < 2 * pp else 2

    @classmethod
    def orders(cls, pp: int, virtual_stages: int, num_microbatches: int) -> Orders:
        return orders.zero_bubble(pp, virtual_stages, num_microbatches)


@dataclass(frozen=True)
class ZBV(Interleaved):
    """ZB-V, as torch's ScheduleZBVZeroBubble: first and last stage share pp rank 0; the turn of the V sends nothing."""

    kind = "zbv"
    explained = (
        "Each rank has two stages laid out in a V, so the first and the last stage share a rank. Backward is "
        "split: the input gradient is sent on at once, weight gradients fill the idle time.",
        "Qi et al. 2023",
    )
    splits_backward = True

    @classmethod
    def check(cls, request: Request) -> list[Problem]:
        if request.virtual_stages == 2:
            return super().check(request)
        what = f"virtual_stages={request.virtual_stages}: the V of zbv has two stages per rank, down and back up"
        return [*super().check(request), Problem(what, "virtual_stages", "virtual_stages=2", kind="undefined")]

    @classmethod
    def check_microbatches(cls, request: Request) -> list[Problem]:
        return []

    @classmethod
    def pp_rank(cls, stage: int, pp: int) -> int:
        """Stages go down the ranks and back up."""
        return stage if stage < pp else 2 * pp - 1 - stage

    @classmethod
    def forward_only(cls, pp: int, virtual_stages: int, num_microbatches: int) -> Orders:
        """All microbatches go down the V before the first comes back up."""
        return orders.forward_only(cls.stages_of_ranks(pp, virtual_stages), num_microbatches, num_microbatches)

    @classmethod
    def orders(cls, pp: int, virtual_stages: int, num_microbatches: int) -> Orders:
        return orders.zbv(pp, num_microbatches)


def boundary_shape(plan: Plan, stage: int) -> tuple[int, ...]:
    """Return the local shape of the input of stage `stage` (from 1) for one microbatch.

    The stage's first block may name its input's shape; otherwise it is the tensor strategy's shape between blocks.
    """
    own = plan.spec.block(plan.stages[stage].blocks[0]).input_shape
    return plan.tensor.boundary_shape(plan) if own is None else (plan.batch.micro_batch, *own)


def boundary_bytes(plan: Plan, stage: int) -> int:
    """Return the bytes that one rank sends to stage `stage` for one microbatch."""
    return prod(boundary_shape(plan, stage)) * BYTES[plan.precision.compute]
