"""ZB-V: two chunks per rank laid out in a V (Qi 2023, section 6). Torch-free."""

from __future__ import annotations

from parallelrun.errors import Problem
from parallelrun.plan.strategy import Request
from parallelrun.strategies.pipeline.strategy import ChunkedWay

from .. import schedules


class Way(ChunkedWay):
    """As torch's ScheduleZBVZeroBubble. First and last stage share coordinate 0; the turn of the V sends nothing."""

    kind = "zbv"
    explained = (
        "Each rank has two stages laid out in a V, so the first and the last stage share a rank. Backward is "
        "split: the input gradient is sent on at once, weight gradients fill the idle time.",
        "Qi et al. 2023",
    )
    splits_backward = True

    def check(self, request: Request) -> list[Problem]:
        problems = super().check(request)
        if request.chunks != 2:
            problems.append(
                Problem(
                    f"chunks={request.chunks}: the V of zbv has two chunks per rank, down and back up",
                    where="chunks",
                    suggestion="chunks=2",
                    kind="undefined",
                )
            )
        return problems

    def check_microbatches(self, request: Request) -> list[Problem]:
        return []

    def pp_rank(self, stage_index: int, pp: int, chunks: int) -> int:
        return schedules.v_pp_rank(stage_index, pp)

    def orders(self, pp: int, chunks: int, num_microbatches: int) -> schedules.Orders:
        return schedules.zbv(pp, num_microbatches)
