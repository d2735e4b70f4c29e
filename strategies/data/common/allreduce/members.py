"""The members of a group that send the same, by arrays with a number for each of them.

numpy is imported on call: most plans need none of this.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from parallelrun.planner.contract.plan import Plan

from .rounds import Number

if TYPE_CHECKING:
    from numpy.typing import NDArray


def places_on(axis: str, size: int, plan: Plan) -> tuple[int, NDArray[Any]]:
    """(members of a group of `axis`, the place in its group of each member of the data axis, in order).

    size: members of the data axis that sum with each other; an axis of experts has fewer, where all of them do.
    """
    import numpy

    rest = numpy.arange(size)
    if axis == plan.data_axis:
        return size, rest
    digits, places = {}, numpy.zeros_like(rest)
    for name in reversed(plan.mesh.mesh_dims_of(plan.data_axis)):
        rest, digits[name] = divmod(rest, plan.mesh.size(name))
    for name in plan.mesh.mesh_dims_of(axis):
        places = places * plan.mesh.size(name) + digits[name]
    return plan.mesh.size(axis), places


def alike(numbers: Iterable[Number], size: int) -> list[tuple[int, int]]:
    """(the first, how many) of the members whose numbers are all equal, by the first. numbers: arrays over `size`
    members, or one number for all of them."""
    import numpy

    table = numpy.stack([numpy.zeros(size, dtype=numpy.int64), *(numpy.broadcast_to(n, size) for n in numbers)])
    order = numpy.lexsort(table)  # stable: the first of a class comes first
    differs = (numpy.diff(table[:, order]) != 0).any(axis=0)
    starts = numpy.flatnonzero(numpy.concatenate(([True], differs)))
    lengths = numpy.diff(numpy.append(starts, size))
    return sorted(zip(order[starts].tolist(), lengths.tolist()))
