"""Naive model parallelism: the whole batch goes through the stages once, one rank works at a time. Torch-free."""

from __future__ import annotations

from parallelrun.errors import Problem
from parallelrun.plan.strategy import Request
from parallelrun.strategies.pipeline.strategy import PipelineWay

from .. import messages, schedules


class Way(PipelineWay):
    """GPipe with one microbatch: utilisation 1 / pp."""

    kind = "naive"
    explained = (
        "The whole batch goes through the stages once, forward and backward: one rank works at a time.",
        "the model parallelism that pipelines improve on",
    )
    takes_microbatches = False

    def check_microbatches(self, request: Request) -> list[Problem]:
        if request.batch is None or request.batch.microbatches == 1:
            return []
        return [
            Problem(
                f"microbatches={request.batch.microbatches}: naive model parallelism has one; with more it is gpipe",
                where="microbatches",
                suggestion="microbatches=1, or schedule=gpipe",
                kind="undefined",
            )
        ]

    def orders(self, pp: int, chunks: int, num_microbatches: int) -> schedules.Orders:
        return schedules.gpipe(pp, num_microbatches)

    def insert_messages(self, orders: schedules.Orders, pp: int, chunks: int) -> messages.Steps:
        return messages.in_turn(orders)
