"""GPipe: all forwards, then all backwards (Huang 2019). Torch-free."""

from __future__ import annotations

from parallelrun.strategies.pipeline.strategy import PipelineWay

from .. import messages, schedules


class Way(PipelineWay):
    """Bubble (pp - 1) / (m + pp - 1); all m microbatches are in flight."""

    kind = "gpipe"
    explained = (
        "All microbatches go forward through the stages, then all go backward. Every microbatch's activations "
        "are kept.",
        "Huang et al. 2019",
    )

    def orders(self, pp: int, chunks: int, num_microbatches: int) -> schedules.Orders:
        return schedules.gpipe(pp, num_microbatches)

    def insert_messages(self, orders: schedules.Orders, pp: int, chunks: int) -> messages.Steps:
        return messages.in_turn(orders)
