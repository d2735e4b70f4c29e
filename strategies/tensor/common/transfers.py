"""Collectives in flight: each begins at once and gives its result when it is asked for."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from parallelrun.distributed import comm
from parallelrun.distributed.mesh import Group

Finish = Callable[[], Tensor]  # waits for a collective and returns its result


def when_done(work: comm.Waitable | None, result: Tensor) -> Finish:
    """Return what waits for a collective, if there is one to wait for, and gives its result."""

    def finish() -> Tensor:
        if work is not None:
            work.wait()
        return result

    return finish


def start_all_gather(part: Tensor, group: Group | None, purpose: str) -> Finish:
    """Begin to gather equal parts (...). The result is (size, ...). group None: the part is the whole."""
    if group is None:
        return lambda: part.unsqueeze(0)
    whole = part.new_empty((group.size, *part.shape))
    work = comm.all_gather_into(whole.flatten(0, 1), part.contiguous(), group, purpose, async_op=True)
    return when_done(work, whole)


def start_reduce_scatter(parts: Tensor, group: Group | None, purpose: str) -> Finish:
    """Begin to sum contiguous `parts` (size, ...) over the group. The result is this rank's part (...)."""
    if group is None:
        return lambda: parts[0]
    own = parts.new_empty(parts.shape[1:])
    return when_done(comm.reduce_scatter_into(own, parts.flatten(0, 1), group, purpose, async_op=True), own)
