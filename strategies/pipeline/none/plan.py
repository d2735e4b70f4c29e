"""One stage per replica: microbatches are gradient accumulation, nothing is sent. Torch-free."""

from __future__ import annotations

from parallelrun.errors import Problem
from parallelrun.plan.strategy import Action, Request
from parallelrun.strategies.pipeline.strategy import PipelineWay

from .. import schedules


class Way(PipelineWay):
    """Forward and backward of one microbatch after the other."""

    kind = "none"
    explained = (
        "One stage: nothing is sent.",
        "",
    )

    def check(self, request: Request) -> list[Problem]:
        problems = super().check(request)
        if request.pp > 1:
            problems.append(
                Problem(
                    f"pp={request.pp}: without a schedule there is one stage",
                    where="schedule",
                    suggestion="schedule=1f1b, or pp=1",
                    kind="undefined",
                )
            )
        return problems

    def orders(self, pp: int, chunks: int, num_microbatches: int) -> schedules.Orders:
        return (tuple(Action(kind, 0, m) for m in range(num_microbatches) for kind in "FB"),)
