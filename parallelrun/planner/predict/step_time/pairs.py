"""Seconds of a forward and a backward pass that take turns (`PipelineSchedule.overlaps_passes`).

Where a pass waits for an all-to-all of rows, the other one computes to its own next wait. So each wait is hidden under
one segment of the other pass, until that has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.predict.simulate import PAIRED
from parallelrun.planner.predict.step_time.blocks import BlockTime
from parallelrun.planner.predict.step_time.overlap import exposed_s


class PassTime(NamedTuple):
    """Of one pass of a stage: its seconds, those of them in which it waits for rows, and in how many places."""

    seconds: float
    waiting: float = 0.0
    places: int = 0


def passes(forward: float, backward: float, blocks: Sequence[tuple[BlockTime, int]]) -> tuple[PassTime, PassTime]:
    """The passes of a stage, of their seconds and its blocks: how many there are of each."""
    waits = [sum(number * time.waits[index] for time, number in blocks) for index in range(3)]
    places = [sum(2 * number for time, number in blocks if time.waits[index]) for index in range(3)]  # there and back
    return PassTime(forward, waits[0], places[0]), PassTime(backward, sum(waits[1:]), sum(places[1:]))


def times(stages: list[tuple[PassTime, PassTime]], plan: Plan) -> dict[str, list[float]]:
    """Seconds of the actions of pairs. stages: (forward, backward) of each; its partner is the rank's other stage."""

    def paired_s(own: PassTime, other: PassTime, segments: int) -> float:
        """Seconds of a pass while `other` computes so many segments in its waits."""
        if not (own.places and segments):
            return own.seconds
        hidden = own.waiting * min(1.0, segments / own.places)
        computing = (other.seconds - other.waiting) * min(1.0, own.places / segments)
        return own.seconds - hidden + exposed_s(hidden, computing)

    others = {stage.index: other.index for stage in plan.stages for other in plan.stages_of(stage.pp_rank)
              if other is not stage}  # fmt: skip
    pairs = [(own, stages[others[index]]) for index, own in enumerate(stages)]
    # A forward begins first: no wait hides its first segment.
    forward = [paired_s(own[0], other[1], other[1].places + 1) for own, other in pairs]
    return {PAIRED["F"]: forward, PAIRED["B"]: [paired_s(own[1], other[0], other[0].places) for own, other in pairs]}
