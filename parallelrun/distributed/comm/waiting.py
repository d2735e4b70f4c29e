"""The collective or message on which this process is blocked, and the number that it has issued."""

from __future__ import annotations

from types import FrameType
from typing import Any

import torch.distributed as dist
from torch import Tensor

from parallelrun.base.context import PendingCollective
from parallelrun.distributed import torch_private
from parallelrun.distributed.shared_memory import is_ours

_OF_TORCH = "torch/distributed/distributed_c10d.py"
_WAITS_FOR_ALL = {
    "all_reduce": "all_reduce", "all_gather": "all_gather", "all_gather_into_tensor": "all_gather",
    "all_gather_single": "all_gather", "reduce_scatter": "reduce_scatter", "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter", "all_to_all_single": "all_to_all", "all_to_all": "all_to_all",
    "broadcast": "broadcast", "reduce": "reduce", "gather": "gather", "scatter": "scatter", "barrier": "barrier",
}  # fmt: skip


def current_wait(frame: FrameType | None) -> PendingCollective | None:
    """Return what this process waits for; None if it is nothing, or nothing that can be told. frame: the innermost one
    of its main thread. May be called in any thread."""
    for group, ranks in torch_private.process_groups():
        pending: PendingCollective | None = group.pending(ranks) if is_ours(group) else None
        if pending is not None:
            return pending
    while frame is not None:
        code = frame.f_code
        if code.co_filename.endswith(_OF_TORCH) and code.co_name in _WAITS_FOR_ALL:
            return _in_call(_WAITS_FOR_ALL[code.co_name], frame.f_locals)
        frame = frame.f_back
    return None


def _in_call(operation: str, arguments: Any) -> PendingCollective | None:
    """Return the collective of one of torch's functions, by its arguments."""
    process_group: Any = arguments.get("group") or dist.group.WORLD
    for group, ranks in torch_private.process_groups():
        if group is process_group:
            values = [value for value in arguments.values() if isinstance(value, Tensor)]
            num_bytes = max((value.nbytes for value in values), default=0)
            number = torch_private.num_collectives(group)
            return PendingCollective(str(group.group_name), ranks, operation, number, num_bytes)
    return None


def num_issued() -> dict[str, int]:
    """Return how many collectives this process has issued, by the name of the group."""
    return {
        str(group.group_name): group.num_issued if is_ours(group) else torch_private.num_collectives(group)
        for group, _ in torch_private.process_groups()
    }
