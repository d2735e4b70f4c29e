"""Event simulation of a pipeline schedule: when each pp rank computes what, and how long it stands idle.

The order of actions is the pipeline schedule's; the times are relative to the model's forward FLOPs. Messages take no
time
here, so the bubble is the schedule's own. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from parallelrun.plan.pipeline_schedule import Action
from parallelrun.plan.structure import Plan

Times = Mapping[str, Sequence[float]]  # kind of action -> seconds (or any unit) per stage index


@dataclass(frozen=True)
class Event:
    """One action with its begin and end, in the unit of the times given."""

    kind: str
    stage: int
    microbatch: int
    begin: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """The timeline of one step. orders: per pp rank its actions; ends: when each of them ends; busy: per pp
    coordinate its working time.

    num_microbatches: those in `orders`. makespan and busy are of the whole step even where `orders` shows fewer
    microbatches (see `of_plan`).
    """

    orders: tuple[Sequence[Action], ...]
    ends: tuple[Sequence[float], ...]
    times: Times
    makespan: float
    busy: tuple[float, ...]
    num_microbatches: int

    def events(self, pp_rank: int) -> list[Event]:
        """The timeline of one pp rank."""
        return [
            Event(a.kind, a.stage, a.microbatch, end - self.times[a.kind][a.stage], end)
            for a, end in zip(self.orders[pp_rank], self.ends[pp_rank])
        ]

    @property
    def ideal(self) -> float:
        """The step's time if all coordinates worked all the time."""
        return sum(self.busy) / len(self.busy)

    @property
    def bubble_of_total(self) -> float:
        """Idle part of the step, averaged over the coordinates."""
        return 1 - self.ideal / self.makespan if self.makespan else 0.0

    @property
    def bubble_of_ideal(self) -> float:
        """Idle time as a part of the ideal time: (p - 1) / m for GPipe and 1F1B on equal stages."""
        return self.makespan / self.ideal - 1 if self.ideal else 0.0


def simulate(orders: Sequence[Sequence[Action]], times: Times, num_stages: int) -> Simulation:
    """Run every coordinate through its actions, each as early as its coordinate and its inputs allow.

    A forward needs the forward of the stage before; a backward (B or I) needs the backward of the stage after, and its
    own forward. A schedule in which actions wait for each other in a circle is an assertion: it would hang.
    """
    assert len(times["F"]) == num_stages
    number = 1 + max((action.microbatch for order in orders for action in order), default=0)
    forward_end: list[float | None] = [None] * (num_stages * number)  # stage x number + microbatch -> end
    backward_end: list[float | None] = [None] * (num_stages * number)
    waiting: dict[tuple[bool, int], int] = {}  # (forward?, key) that a stopped coordinate waits for -> that coordinate
    ends: list[list[float]] = [[] for _ in orders]
    clock = [0.0] * len(orders)
    last = num_stages - 1
    runnable = list(range(len(orders)))
    while runnable:
        lane = runnable.pop()
        order, finished, now = orders[lane], ends[lane], clock[lane]
        for index in range(len(finished), len(order)):
            action = order[index]
            kind, stage = action.kind, action.stage
            if kind == "W":
                now += times["W"][stage]
                finished.append(now)
                continue
            key = stage * number + action.microbatch
            forward = kind == "F"
            if forward or stage == last:  # the stage before; a backward on the last stage needs its own forward
                inputs, needed = forward_end, key - number if forward else key
            else:
                inputs, needed = backward_end, key + number
            if needed >= 0:
                ready = inputs[needed]
                if ready is None:
                    waiting[inputs is forward_end, needed] = lane
                    break
                if ready > now:
                    now = ready
            now += times[kind][stage]
            finished.append(now)
            (forward_end if forward else backward_end)[key] = now
            if waiting and (forward, key) in waiting:
                runnable.append(waiting.pop((forward, key)))
        clock[lane] = now
    left = [lane for lane, order in enumerate(orders) if len(ends[lane]) < len(order)]
    assert not left, f"pp ranks {left} wait for each other in a circle"
    busy = tuple(sum(times[action.kind][action.stage] for action in order) for order in orders)
    return Simulation(tuple(orders), tuple(ends), times, max(clock, default=0.0), busy, number)


def action_times(plan: Plan) -> dict[str, list[float]]:
    """FLOPs of one microbatch on one rank per action kind and stage: B = 2F, I = W = F, and recomputation with B or I.

    Recomputation repeats the blocks that a model says can be repeated: neither its embedding nor its head.
    On stage 0 there is no input gradient to send: torch leaves the whole backward to W there.
    """
    forward = stage_flops(plan)
    again = stage_flops(plan, recomputed=True) if plan.recompute == "full" else [0.0] * len(forward)
    inputs = [flops + extra if stage else 0.0 for stage, (flops, extra) in enumerate(zip(forward, again))]
    weights = [flops if stage else 2 * flops + again[0] for stage, flops in enumerate(forward)]
    both = [2 * flops + extra for flops, extra in zip(forward, again)]
    return {"F": forward, "B": both, "I": inputs, "W": weights}


def stage_flops(plan: Plan, recomputed: bool = False) -> list[float]:
    """Forward FLOPs of one microbatch on one rank, per stage: the tensor axes share them evenly.

    recomputed: only of the blocks that recomputation repeats.
    """
    share = plan.batch.micro_batch / plan.mesh.size("tp")
    stages = [[plan.spec.block(name) for name in stage.blocks] for stage in plan.stages]
    return [share * sum(b.forward_flops for b in blocks if b.is_recomputed or not recomputed) for blocks in stages]


def of_plan(plan: Plan) -> Simulation:
    """The simulation of a plan's step.

    Many microbatches repeat: above 16 per coordinate, 3, 4 and 5 rounds of one microbatch per coordinate are simulated;
    if the last two rounds took equal times, the others do so too and are added up instead of simulated.
    """
    pp, count = plan.mesh.size("pp"), plan.batch.microbatches
    if pp == 1 or count <= 16 * pp:
        return _simulate_with(plan, count)
    some = [_simulate_with(plan, rounds * pp + count % pp) for rounds in (3, 4, 5)]
    first, second = some[1].makespan - some[0].makespan, some[2].makespan - some[1].makespan
    if abs(first - second) > 1e-9 * second:
        return _simulate_with(plan, count)
    shown = some[2].num_microbatches
    return replace(
        some[2],
        makespan=some[2].makespan + (count - shown) // pp * second,
        busy=tuple(busy * count / shown for busy in some[2].busy),
    )


def of_schedule(plan: Plan) -> Simulation:
    """The whole step with stages that all take the same time: a forward takes 1, a backward 2."""
    times = {kind: [length] * len(plan.stages) for kind, length in (("F", 1.0), ("B", 2.0), ("I", 1.0), ("W", 1.0))}
    return simulate(plan.pipeline.actions(plan), times, len(plan.stages))


def _simulate_with(plan: Plan, count: int) -> Simulation:
    batch = replace(plan.batch, microbatches=count)
    times = action_times(plan)
    if not any(times["F"]):  # a model that counts no FLOPs: equal stages
        times = {kind: [length] * len(plan.stages) for kind, length in (("F", 1.0), ("B", 2.0), ("I", 1.0), ("W", 1.0))}
    return simulate(plan.pipeline.actions(replace(plan, batch=batch)), times, len(plan.stages))
