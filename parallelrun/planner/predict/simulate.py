"""Event simulation of a pipeline schedule: the begin and end of every action, and each pp rank's idle time.

The schedule gives the order of actions, and the model's FLOPs give their times. Messages take no time, so the bubble is
that of the schedule alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from operator import add, itemgetter

from parallelrun.planner.contract.pipeline_schedule import Action, is_pair
from parallelrun.planner.contract.plan import Plan, once

FEW_ACTIONS = 4096  # a step of so many is simulated in full, and can be drawn
Times = Mapping[str, Sequence[float]]  # kind of action -> seconds (or any unit) per stage index
PAIRED = {"F": "F of a pair", "B": "B of a pair"}  # kinds in Times, where the schedule `overlaps_passes`


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
    """The timeline of one step. Per pp rank, orders: its actions; ends: the end of each action; busy: its working time.

    num_microbatches: the number in `orders`. makespan and busy cover the full step even if `orders` has fewer
    microbatches (see `of_plan`).
    """

    orders: tuple[Sequence[Action], ...]
    ends: tuple[Sequence[float], ...]
    times: Times
    makespan: float
    busy: tuple[float, ...]
    num_microbatches: int

    def events(self, pp_rank: int) -> list[Event]:
        """The timeline of one pp rank. A pair's forward comes first."""
        order, paired = self.orders[pp_rank], _pairs(self.orders[pp_rank : pp_rank + 1], self.times, 0)
        seconds = [paired[a][0] if a in paired else self.times[a.kind][a.stage] for a in order]
        return [Event(*a, end - took, end) for a, took, end in zip(order, seconds, self.ends[pp_rank])]

    @property
    def ideal(self) -> float:
        """The step's time if no pp rank were ever idle."""
        return sum(self.busy) / len(self.busy)

    @property
    def bubble_of_total(self) -> float:
        """The idle part of the step, averaged over pp ranks."""
        return 1 - self.ideal / self.makespan if self.makespan else 0.0

    @property
    def bubble_of_ideal(self) -> float:
        """Idle time over ideal time: (p - 1) / m for GPipe and 1F1B on equal stages."""
        return self.makespan / self.ideal - 1 if self.ideal else 0.0


def simulate(orders: Sequence[Sequence[Action]], times: Times, num_stages: int) -> Simulation:
    """Run every pp rank through its actions, each as early as its rank and its inputs allow.

    A forward needs the forward of the previous stage; a backward (B or I) needs the backward of the next stage and its
    own forward. A pair begins when the inputs of both are there, and both end together. Asserts that the schedule does
    not deadlock.
    """
    assert len(times["F"]) == num_stages
    number = 1 + max((max(map(itemgetter(2), order)) for order in orders if order), default=0)
    size, last = num_stages * number, num_stages - 1
    # of forwards by stage x number + microbatch, then of backwards; at -1: of what needs no input
    end: list[float | None] = [*[None] * (2 * size), 0.0]
    waiting: dict[int, int] = {}  # index into `end` -> the pp rank that is blocked on it
    ends: list[list[float]] = [[] for _ in orders]
    clock, worked = [0.0] * len(orders), [0.0] * len(orders)
    runnable, pairs = list(range(len(orders))), _pairs(orders, times, number)
    while runnable:
        pp_rank = runnable.pop()
        finished, now, work = ends[pp_rank], clock[pp_rank], worked[pp_rank]
        for kind, stage, microbatch in islice(orders[pp_rank], len(finished), None):
            seconds, together = times[kind][stage], 0.0
            if kind == "W":
                now, work = now + seconds, work + seconds
                finished.append(now)
                continue
            if kind == "F":
                own = stage * number + microbatch
                needed = own - number if stage else -1
            else:
                own = size + stage * number + microbatch
                needed = own + number if stage < last else own - size  # the last stage's needs its own forward
            ready = end[needed]
            if pairs and (kind, stage, microbatch) in pairs:
                seconds, also, together = pairs[kind, stage, microbatch]
                if ready is not None and (of_other := end[also]) is not None:
                    ready = max(ready, of_other)
                else:
                    needed, ready = needed if ready is None else also, None
            if ready is None:
                waiting[needed] = pp_rank
                break
            now = (ready if ready > now else now) + seconds
            work += seconds
            finished.append(now)
            end[own] = now + together
            if own in waiting:
                runnable.append(waiting.pop(own))
        clock[pp_rank], worked[pp_rank] = now, work
    left = [pp_rank for pp_rank, order in enumerate(orders) if len(ends[pp_rank]) < len(order)]
    assert not left, f"pp ranks {left} are in a deadlock"
    return Simulation(tuple(orders), tuple(ends), times, max(clock, default=0.0), tuple(worked), number)


def _pairs(
    orders: Sequence[Sequence[Action]], times: Times, number: int
) -> dict[tuple[str, int, int], tuple[float, int, float]]:
    """Of each action of a pair: its seconds, the index in `simulate` of what its other action waits for (-1: of what is
    there), and the seconds of the pair after it. Empty where the schedule has no pairs."""
    pairs: dict[tuple[str, int, int], tuple[float, int, float]] = {}
    size, last = len(times["F"]) * number, len(times["F"]) - 1
    for first, second in (pair for order in orders for pair in pairwise(order)) if PAIRED["F"] in times else ():
        if is_pair(first, second):
            needed = number * (second.stage + 1) + size if second.stage < last else number * last
            later = times[PAIRED["B"]][second.stage]
            pairs[first] = times[PAIRED["F"]][first.stage], needed + second.microbatch, later
            pairs[second] = later, -1, 0.0
    return pairs


def action_times(plan: Plan) -> dict[str, list[float]]:
    """FLOPs of one microbatch on one rank per action kind and stage: B = 2F, I = W = F, and recomputation with B or I.

    Recomputation repeats all blocks except the embedding and the head. Stage 0 has no input gradient, so W computes
    its entire backward.
    """
    forward = stage_flops(plan)
    again = stage_flops(plan, recomputed=True) if plan.runs_again else [0.0] * len(forward)
    inputs = [flops + extra if stage else 0.0 for stage, (flops, extra) in enumerate(zip(forward, again))]
    weights = [flops if stage else 2 * flops + again[0] for stage, flops in enumerate(forward)]
    both = [2 * flops + extra for flops, extra in zip(forward, again)]
    times = {"F": forward, "B": both, "I": inputs, "W": weights}
    return times | {PAIRED["F"]: forward, PAIRED["B"]: both} if plan.pipeline.overlaps_passes else times


def stage_flops(plan: Plan, recomputed: bool = False) -> list[float]:
    """Forward FLOPs of one microbatch on one rank, per stage: an equal share for each tp and cp rank.

    recomputed: count only the blocks that recomputation repeats.
    """
    share = plan.batch.micro_batch / plan.mesh.size("tp") / plan.mesh.size("cp")
    stages = [[plan.spec.block(name) for name in stage.blocks] for stage in plan.stages]
    return [share * sum(b.forward_flops for b in blocks if b.is_recomputed or not recomputed) for blocks in stages]


def of_plan(plan: Plan, microbatches: int | None = None) -> Simulation:
    """Simulate a plan's step, with FLOPs as times. microbatches: their number, if it is not the plan's."""
    times = action_times(plan)
    if any(times["F"]):
        return run(plan, times, microbatches)
    return of_schedule(plan if microbatches is None else _with_microbatches(plan, microbatches))  # no FLOPs are known


def run(plan: Plan, times: Times, microbatches: int | None = None) -> Simulation:
    """Simulate a plan's step with the given times of actions. microbatches: see `of_plan`.

    Of many microbatches, only some are simulated if a further round then takes the longest forward and the longest
    backward of any pp rank. No round takes longer, so all others take as long, and their times are added. A round is
    one microbatch, or where a rank runs several stages one per pp rank, or more where they are not divisible by pp (no
    order is known of numbers that are not in whole rounds).
    """
    pp, count = plan.mesh.size("pp"), plan.batch.microbatches if microbatches is None else microbatches
    each, begin = 1, pp
    if len(plan.stages) > pp:
        num_rounds = count // pp
        each = begin = pp if not num_rounds or count % num_rounds else count // num_rounds
    first = begin + each + (count - begin) % each
    if pp == 1 or 2 * count * len(plan.stages) <= FEW_ACTIONS:
        return _simulate_with(plan, count, times)
    for rounds in (first, first + begin):
        if rounds + each >= count:
            break
        before, after = (_simulate_with(plan, some, times) for some in (rounds, rounds + each))
        works = [late - early for early, late in zip(before.busy, after.busy)]
        ahead = times.get(PAIRED["F"], times["F"])
        forwards = [each * sum(ahead[stage.index] for stage in plan.stages_of(rank)) for rank in range(pp)]
        slowest = max(forwards) + max(work - forward for work, forward in zip(works, forwards))
        if abs(after.makespan - before.makespan - slowest) <= 1e-9 * slowest:
            more = (count - after.num_microbatches) // each
            return replace(
                after,
                makespan=after.makespan + more * slowest,
                busy=tuple(busy + more * work for busy, work in zip(after.busy, works)),
            )
    return _simulate_with(plan, count, times)


def least(plan: Plan, times: Times) -> float:
    """The least time of a step, whatever the order of actions: that of the pp rank for which this is longest.

    Before it can begin, a microbatch goes forward through all earlier stages; then it does its work. A backward pass
    is its last action, after which the microbatch goes back through them, unless backward is split.
    """
    splits = plan.pipeline.splits_backward
    backs = list(map(add, times["I"], times["W"])) if splits else times["B"]
    backs = times.get(PAIRED["B"], backs)
    works = [0.0] * plan.mesh.size("pp")
    outside: dict[int, float] = {}  # by pp rank, what is before its first forward and behind its last backward
    forward = backward = 0.0
    for stage, ahead, back in zip(plan.stages, times.get(PAIRED["F"], times["F"]), backs):
        rank = stage.pp_rank
        if rank not in outside:
            outside[rank] = forward + backward
        works[rank] += ahead + back
        forward += ahead
        if not splits:
            backward += back
    return max(outside[rank] + plan.batch.microbatches * work for rank, work in enumerate(works))


def of_schedule(plan: Plan) -> Simulation:
    """Simulate the full step with equal stages: a forward takes 1, a backward 2."""
    units = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
    units |= {kind: units[alone] for alone, kind in PAIRED.items()} if plan.pipeline.overlaps_passes else {}
    times = {kind: [time] * len(plan.stages) for kind, time in units.items()}
    return simulate(plan.pipeline.actions(plan), times, len(plan.stages))


def _simulate_with(plan: Plan, count: int, times: Times) -> Simulation:
    """Simulate so many microbatches, once: steps of many microbatches begin and end alike."""
    key = "simulated", count, tuple((kind, tuple(row)) for kind, row in times.items())
    changed = _with_microbatches(plan, count)
    return once(plan.cache, key, lambda: simulate(plan.pipeline.actions(changed), times, len(plan.stages)))


def _with_microbatches(plan: Plan, count: int) -> Plan:
    return plan.sharing(batch=replace(plan.batch, microbatches=count))
