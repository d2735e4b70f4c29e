"""The one file that touches torch's private symbols. Small functions, each saying what it needs them for."""

from __future__ import annotations


def schedule_actions(name: str, pp: int, num_microbatches: int, chunks: int) -> list[list[tuple[str, int, int]]]:
    """The order of actions of torch's pipeline schedule `name`: (kind, stage, microbatch) per pp coordinate.

    Public schedules keep their order in attributes only their own runtime reads. For tests: ours must equal it.
    """
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    orders = get_schedule_ops(name, pp, num_microbatches, chunks if chunks > 1 else None)
    kinds = ("F", "B", "I", "W")
    return [
        [(str(a.computation_type.value), a.stage_index, a.microbatch_index) for a in order
         if a is not None and a.computation_type.value in kinds]
        for order in orders
    ]  # fmt: skip
