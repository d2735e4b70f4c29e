"""What the pipeline schedules share before a run: checks, live microbatches, messages in closed form. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import prod

from parallelrun import registry
from parallelrun.errors import Problem
from parallelrun.plan import simulate
from parallelrun.plan.messages import Exchange, Explanation, Message, Round, ranks_over
from parallelrun.plan.strategy import Action, Request
from parallelrun.plan.structure import Collective, Plan
from parallelrun.precision import BYTES
from parallelrun.strategies.pipeline import messages, schedules


class PipelineWay:
    """A PipelineWayPlan whose kinds differ in the order of actions, the shape (loop or V) and the checks.

    single_chunk: the schedule has one stage per coordinate. splits_backward: input and weight gradients are separate
    passes, in which parameter hooks fire for half of the parameters and custom backward functions run twice.
    takes_microbatches: the schedule allows more than one.
    """

    kind = ""
    explained = "", ""  # what the schedule does, in sentences, and the paper: for `explain`
    takes_microbatches = True
    single_chunk = True
    splits_backward = False

    def orders(self, pp: int, chunks: int, num_microbatches: int) -> schedules.Orders:
        """The actions of every pp rank."""
        raise AssertionError(f"{type(self)} has no order of actions")

    def check(self, request: Request) -> list[Problem]:
        """Every violation, each with the nearest legal value."""
        problems = []
        if self.single_chunk and request.chunks != 1:
            problems.append(self._one_stage_per_rank(request.chunks))
        return problems + self.check_microbatches(request)

    def check_microbatches(self, request: Request) -> list[Problem]:
        """The part of `check` that needs the batch; nothing to say while it does not divide."""
        return []

    def pp_rank(self, stage_index: int, pp: int, chunks: int) -> int:
        """The pp rank that runs a stage."""
        return schedules.loop_pp_rank(stage_index, pp)

    def actions(self, plan: Plan) -> list[list[Action]]:
        """Per pp rank, in order."""
        return [list(order) for order in self._orders(plan)]

    def in_flight(self, plan: Plan, pp_rank: int) -> dict[int, int]:
        """Per stage index of that coordinate: the most microbatches whose activations are alive at once."""
        return schedules.peak_in_flight(self._orders(plan)[pp_rank])

    def steps(self, plan: Plan) -> messages.Steps:
        """Per pp rank, its actions and messages in order, as they are run."""
        return _steps(self.kind, plan.mesh.size("pp"), plan.pipeline.chunks, plan.batch.microbatches)

    def insert_messages(self, orders: schedules.Orders, pp: int, chunks: int) -> messages.Steps:
        """The steps of `orders`."""

        def pp_rank(stage: int, pp: int) -> int:
            return self.pp_rank(stage, pp, chunks)

        return messages.with_messages(orders, pp_rank, pp * chunks)

    def activation_bytes(self, plan: Plan, pp_rank: int, kept: Mapping[int, int]) -> int:
        """The most bytes of activations and of messages that a rank at that pp rank holds at once.

        kept: per stage of that coordinate, what a microbatch keeps for backward.
        """
        return max(most for _, _, most in self._walk(plan, pp_rank, kept))

    def live_bytes(self, plan: Plan, pp_rank: int, kept: Mapping[int, int]) -> list[tuple[Action, int]]:
        """The actions of that rank in order, each with those bytes when it begins."""
        steps = self._walk(plan, pp_rank, kept)
        return [(Action(*step[:3]), before) for step, before, _ in steps if step.kind in messages.ACTIONS]

    def _walk(self, plan: Plan, pp_rank: int, kept: Mapping[int, int]) -> list[tuple[messages.Step, int, int]]:
        touched = {index for stage in plan.stages_of(pp_rank) for index in (stage.index, stage.index + 1)}
        inputs = {index: boundary_bytes(plan, index) for index in touched if 0 < index < len(plan.stages)}
        return list(messages.live_bytes(self.steps(plan)[pp_rank], kept, inputs))

    def collectives(self, pp_rank: int, plan: Plan) -> list[Collective]:
        """One rank's messages of one step: each microbatch crosses each cut between coordinates once each way.

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
        """The messages between the stages of the pipeline of rank 0, in the order of a simulated step."""
        ranks, last = ranks_over(plan, "pp"), len(plan.stages) - 1
        run = simulate.of_schedule(plan, self)
        sent: dict[float, list[Message]] = {}
        for pp_rank, order in enumerate(run.orders):
            for action, ended in zip(order, run.ends[pp_rank], strict=True):
                step = {"F": 1, "B": -1, "I": -1, "W": 0}[action.kind]
                to = action.stage + step
                if not step or not 0 <= to <= last or plan.stages[to].pp_rank == pp_rank:
                    continue
                what, purpose = ("activations", "activations") if step > 0 else ("their gradients", "gradients")
                size = boundary_bytes(plan, max(action.stage, to))
                label = f"{what} of microbatch {action.microbatch}, stage {action.stage} to {to}"
                target = ranks[plan.stages[to].pp_rank]
                sent.setdefault(round(ended, 6), []).append(Message(ranks[pp_rank], target, label, size, purpose))
        rounds = tuple(Round(f"at {moment:g} forward times", tuple(sent[moment])) for moment in sorted(sent))
        bubble = f"{run.bubble_of_total:.0%} of the step is bubble where all stages take equal time."
        text = f"{self.explained[0]} {bubble}"
        title = f"one step of {plan.batch.microbatches} microbatches on {len(ranks)} ranks"
        groups = plan.mesh.num_ranks // len(ranks)
        exchange = Exchange(title, rounds)
        return Explanation("pipeline", self.kind, text, self.explained[1], ranks, groups, "pp", (exchange,))

    def _orders(self, plan: Plan) -> schedules.Orders:
        return self.orders(plan.mesh.size("pp"), plan.pipeline.chunks, plan.batch.microbatches)

    def _one_stage_per_rank(self, chunks: int) -> Problem:
        return Problem(
            f"chunks={chunks}: {self.kind} runs one stage per rank",
            where="chunks",
            suggestion="chunks=1, or schedule=interleaved",
            kind="undefined",
        )


@lru_cache(maxsize=16)
def _steps(kind: str, pp: int, chunks: int, num_microbatches: int) -> messages.Steps:
    strategy = registry.load("strategies", f"pipeline.{kind}", "plan").Way()
    return strategy.insert_messages(strategy.orders(pp, chunks, num_microbatches), pp, chunks)


class ChunkedWay(PipelineWay):
    """A way of several stages per rank: it needs a pipeline, and whole rounds of microbatches."""

    single_chunk = False

    def check(self, request: Request) -> list[Problem]:
        problems = []
        if request.pp == 1:
            problems.append(
                Problem(
                    f"pp=1: {self.kind} orders the stages of several ranks, and there is one",
                    where="pp",
                    suggestion="pp=2, or schedule=gpipe",
                    kind="undefined",
                )
            )
        return problems + super().check(request)

    def check_microbatches(self, request: Request) -> list[Problem]:
        if request.batch is None or request.pp == 1:
            return []
        m = request.batch.microbatches
        rounds = schedules.num_rounds(request.pp, m)
        if m % rounds == 0:
            return []
        return [
            Problem(
                f"microbatches={m} do not make {rounds} equal rounds of about pp={request.pp}, in which "
                f"{self.kind} goes through a rank's chunks",
                where="microbatches",
                suggestion=f"microbatches={_nearest_in_rounds(request, self)}",
                kind="arithmetic",
            )
        ]


def _nearest_in_rounds(request: Request, strategy: PipelineWay) -> int:
    """The legal number of microbatches nearest to the given one among those that divide the replica's batch."""
    assert request.batch is not None
    samples, given = request.batch.replica_batch, request.batch.microbatches
    legal = [m for m in range(1, samples + 1) if samples % m == 0 and m % schedules.num_rounds(request.pp, m) == 0]
    return min(legal, key=lambda m: (abs(m - given), m))


def boundary_shape(plan: Plan, stage: int) -> tuple[int, ...]:
    """Shape of what stage number `stage` (from 1) takes of one microbatch, on one rank: as its first block says, else
    as the tensor strategy cuts what passes between any two blocks."""
    own = plan.spec.block(plan.stages[stage].blocks[0]).input_shape
    if own is not None:
        return (plan.batch.micro_batch, *own)
    return registry.load("strategies", f"tensor.{plan.tensor.kind}", "plan").Way().boundary_shape(plan)


def boundary_bytes(plan: Plan, stage: int) -> int:
    """Bytes of what one rank passes to stage number `stage` for one microbatch."""
    return prod(boundary_shape(plan, stage)) * BYTES[plan.precision.compute]
