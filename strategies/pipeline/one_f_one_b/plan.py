"""1F1B with flush (PipeDream-Flush; Narayanan 2021, section 2.2.1). Torch-free."""

from __future__ import annotations

from parallelrun.errors import Problem
from parallelrun.plan.strategy import Request
from parallelrun.strategies.pipeline.strategy import PipelineWay

from .. import messages, schedules


class Way(PipelineWay):
    """GPipe's bubble with at most pp microbatches in flight; needs as many microbatches as stages."""

    kind = "1f1b"
    explained = (
        "After a warm-up, each rank alternates one forward and one backward, so that at most as many "
        "microbatches are kept as there are stages.",
        "Narayanan et al. 2019, 2021 (PipeDream-Flush)",
    )

    def check_microbatches(self, request: Request) -> list[Problem]:
        if request.batch is None or request.batch.microbatches >= request.pp:
            return []
        samples = request.batch.replica_batch
        enough = [m for m in range(request.pp, samples + 1) if samples % m == 0]
        smallest = f"microbatches={enough[0]}, or " if enough else f"global_batch={request.pp * request.dp}, or "
        return [
            Problem(
                f"microbatches={request.batch.microbatches} are fewer than the pp={request.pp} stages of 1f1b",
                where="microbatches",
                suggestion=f"{smallest}schedule=gpipe",
                kind="undefined",
            )
        ]

    def orders(self, pp: int, chunks: int, num_microbatches: int) -> schedules.Orders:
        return schedules.one_f_one_b(pp, num_microbatches)

    def insert_messages(self, orders: schedules.Orders, pp: int, chunks: int) -> messages.Steps:
        return messages.joined_in_turn(orders)
