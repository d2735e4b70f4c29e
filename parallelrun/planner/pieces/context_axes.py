"""The mesh dims of dp x cp, which the data strategy, ep and cp cut at different places.

Every axis is a range of the index along dp x cp: cp the fastest, dp the rest; HSDP shards over an inner part of both,
and ep takes the innermost ranks. Mesh dims are what lies between two neighbouring cuts.
"""

from __future__ import annotations

from itertools import pairwise
from math import prod

from parallelrun.base.errors import Problem
from parallelrun.base.wording import divisors, either, nearest
from parallelrun.planner.contract.data_strategy import DataStrategy, FlattenedDims, MeshDims
from parallelrun.planner.contract.mesh_shape import MeshShape
from parallelrun.planner.contract.plan import DATA_CONTEXT
from parallelrun.planner.contract.request import Request
from parallelrun.planner.pieces import expert_axes

Axes = tuple[MeshDims, FlattenedDims]  # the mesh dims of a strategy, and what they are together
Ranges = dict[str, tuple[int, int]]  # axis: (ranks in front of the next index along it, ranks of all of it)


def mesh_shape(pp: int, data: Axes, context: Axes | None, ep: Axes, tensor: Axes) -> MeshShape:
    """The mesh of a plan. data: of the data strategy over dp x cp; context, ep: None and empty without."""
    data_dims, flattened = split(data, context, ep) if context else expert_axes.split(*data, *ep)
    return MeshShape((("pp", pp), *data_dims, *tensor[0]), expert_axes.joined(flattened, tensor))


def split(data: Axes, context: Axes, ep: Axes) -> Axes:
    """(mesh dims, flattened dims) of dp x cp. data: of the data strategy over all of it; ep: empty without."""
    ranges = _ranges(data, context, ep)
    cuts = sorted({cut for span in ranges.values() for cut in span})
    assert all(large % small == 0 for small, large in pairwise(cuts)), f"{ranges} cut across each other"
    mesh_dims: list[tuple[str, int]] = []
    name_of = {span: axis for axis, span in reversed(ranges.items())}
    for low, high in reversed(list(pairwise(cuts))):
        name = name_of.get((low, high)) or f"{_around(low, high, ranges)}_part_{len(mesh_dims)}"
        mesh_dims.append((name, high // low))
    if ranges["dp"][0] == ranges["dp"][1]:
        mesh_dims.insert(0, ("dp", 1))
    place, high = {}, cuts[-1]
    for name, degree in mesh_dims:
        high //= degree
        place[name] = high
    flattened = tuple(
        (axis, tuple(name for name, cut in place.items() if low <= cut < high))
        for axis, (low, high) in ranges.items()
        if axis not in place
    )
    return tuple(mesh_dims), (*flattened, *ep[1])


def _around(low: int, high: int, ranges: Ranges) -> str:
    """The smallest axis around a mesh dim that is no axis itself."""
    around = [(end // start, axis) for axis, (start, end) in ranges.items() if start <= low and high <= end]
    return min(around)[1]


def _ranges(data: Axes, context: Axes, ep: Axes) -> Ranges:
    """Data axes are named first: where two axes are the same ranks, the mesh dim has the first name."""
    dims: Ranges = {}
    total = prod(degree for _, degree in data[0])
    cp = prod(degree for _, degree in context[0])
    dims["dp"] = cp, total
    dims |= {"cp": (1, cp)} | _of_dims(context[0])
    dims[DATA_CONTEXT] = 1, total
    if len(data[0]) > 1:
        dims |= _of_dims(data[0])
    if ep[0]:
        inner = prod(degree for _, degree in ep[0])
        dims |= _of_dims(ep[0])
        dims[expert_axes.EXPERT + "dp"] = inner, total
        minor, size = data[0][-1]
        if len(data[0]) > 1:
            dims[expert_axes.EXPERT + minor] = inner, size
        if inner < cp:
            dims[expert_axes.EXPERT_CP] = inner, cp
    return dims


def _of_dims(dims: MeshDims) -> Ranges:
    axes, low = {}, 1
    for name, degree in reversed(dims):
        axes[name] = low, low * degree
        low *= degree
    return axes


def is_of_context(axis: str) -> bool:
    """Return whether the axis exists only because of cp: cp and its parts."""
    return axis.partition("_")[0] == "cp"


def check(request: Request, strategy: type[DataStrategy], context: Axes) -> list[Problem]:
    """Check that the data strategy sums gradients over cp, and that nothing cuts dp x cp across cp."""
    where, cp = "strategy.data.kind", request.cp
    if strategy.check(request):  # reported on their own: an illegal strategy cannot be resolved
        return []
    data, problems = strategy.resolve(request), []
    if not strategy.takes_context:
        message = f"cp={cp}: {where}={data.kind} does not sum gradients over ranks that share a sequence"
        problems.append(Problem(message, where, f"{where}=ddp or cp=1", kind="not_built"))
        return problems
    inner = data.mesh_dims(request.num_data_ranks)[0][-1][1]
    for key, size in (("strategy.data.shard", inner), (expert_axes.EP, request.ep_data_ranks)):
        for cut in _cuts(context[0]):
            if size % cut and cut % size:
                legal = [n for n in divisors(request.num_data_ranks) if n > 1 and (n % cut == 0 or cut % n == 0)]
                message = f"{key}={size} ranks of dp x cp={request.num_data_ranks} cut across cp={cp}"
                problems.append(Problem(message, key, either(key, nearest(size, legal)), kind="arithmetic"))
                break
    return problems


def _cuts(dims: MeshDims) -> list[int]:
    return [high for _, high in _of_dims(dims).values()]
