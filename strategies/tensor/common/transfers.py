"""Collectives in flight, each of which begins at once and gives its result later, and what runs beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from parallelrun.distributed import comm
from parallelrun.distributed.mesh import Group

Finish = Callable[[], Tensor]  # waits for a collective and returns its result


def when_done(work: comm.Waitable, result: Tensor) -> Finish:
    """Return what waits for a collective and gives its result."""

    def finish() -> Tensor:
        work.wait()
        return result

    return finish


def start_all_gather(part: Tensor, group: Group | None, purpose: str) -> Finish:
    """Begin to gather equal parts (...). The result is (size, ...). group None: the part is the whole."""
    if group is None:
        return lambda: part.unsqueeze(0)
    gathered = part.new_empty((group.size, *part.shape))
    work = comm.all_gather_into(gathered.flatten(0, 1), part.contiguous(), group, purpose, async_op=True)
    return when_done(work, gathered)


def start_reduce_scatter(parts: Tensor, group: Group | None, purpose: str) -> Finish:
    """Begin to sum contiguous `parts` (size, ...) over the group. The result is this rank's part (...)."""
    if group is None:
        return lambda: parts[0]
    own = parts.new_empty(parts.shape[1:])
    return when_done(comm.reduce_scatter_into(own, parts.flatten(0, 1), group, purpose, async_op=True), own)


def sum_of_products(grads: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """Return the input gradient of a layer: the sum over its outputs of grad @ weight, accumulated in one buffer."""
    total: Tensor = grads[0] @ weights[0]
    for grad, weight in zip(grads[1:], weights[1:]):
        total.addmm_(grad, weight)
    return total
