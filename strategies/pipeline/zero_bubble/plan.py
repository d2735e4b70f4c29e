"""Zero bubble (ZB1P, Qi 2023, section 3) over looped chunks. Torch-free."""

from __future__ import annotations

from parallelrun.strategies.pipeline.strategy import ChunkedWay

from .. import schedules


class Way(ChunkedWay):
    """As torch's ScheduleInterleavedZeroBubble: weight gradients fill what would be bubble."""

    kind = "zero_bubble"
    explained = (
        "Backward is split: the input gradient is sent on at once, and the weight gradient is computed when "
        "the rank would be idle.",
        "Qi et al. 2023",
    )
    splits_backward = True

    def orders(self, pp: int, chunks: int, num_microbatches: int) -> schedules.Orders:
        return schedules.zero_bubble(pp, chunks, num_microbatches)
