"""Interleaved 1F1B: several chunks per rank, the bubble divided by their number (Narayanan 2021, 2.2.2). Torch-free."""

from __future__ import annotations

from parallelrun.strategies.pipeline.strategy import ChunkedWay

from .. import schedules


class Way(ChunkedWay):
    """As torch's ScheduleInterleaved1F1B: rounds of about pp microbatches, equal in size."""

    kind = "interleaved"
    explained = (
        "As 1F1B, but each rank has several stages, so a microbatch passes every rank several times: more "
        "messages, and a bubble smaller by that factor.",
        "Narayanan et al. 2021",
    )

    def orders(self, pp: int, chunks: int, num_microbatches: int) -> schedules.Orders:
        return schedules.interleaved(pp, chunks, num_microbatches)
