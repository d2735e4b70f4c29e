"""Which server owns which rows of which parameter. Torch-free; every rank derives the same answer from the plan.

Whole variables placed round-robin leave servers unbalanced (tensorflow#45291): large tensors are cut, as
MinSizePartitioner does, and the pieces go to the least loaded server, the largest first (Graham 1969).
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heapreplace
from math import prod

from parallelrun.layout import chunk_range
from parallelrun.models.spec import ParameterSpec
from parallelrun.plan.structure import Plan
from parallelrun.precision import BYTES

from .settings import ParameterServerWay


@dataclass(frozen=True)
class Shard:
    """Rows [start, stop) of dim 0 of the one-device parameter `name` lie on `server`; a scalar has rows 0 to 1."""

    server: int
    name: str
    start: int
    stop: int

    def shape(self, parameter: ParameterSpec) -> tuple[int, ...]:
        """Shape of these rows; () for a scalar."""
        return (self.stop - self.start, *parameter.shape[1:]) if parameter.shape else ()

    def numel(self, parameter: ParameterSpec) -> int:
        """Elements of these rows."""
        return prod(self.shape(parameter))


def num_rows(parameter: ParameterSpec) -> int:
    """Length of dim 0; 1 for a scalar."""
    return parameter.shape[0] if parameter.shape else 1


def assign(plan: Plan) -> tuple[Shard, ...]:
    """The shards of all trained parameters, in the plan's order of parameters and rows: each row on one server.

    What is frozen is on no server. No two shards of a server are neighbours of one parameter.
    """
    way = plan.data
    assert isinstance(way, ParameterServerWay), f"{way.kind} has no servers"
    size = BYTES[plan.precision.stored]
    pieces = [
        piece
        for order, parameter in enumerate(plan.spec.parameters.values())
        if not parameter.frozen
        for piece in _pieces(order, parameter, way, size)
    ]
    loads = [(0, server) for server in range(way.servers)]
    heapify(loads)
    placed = []
    for numel, order, start, stop, name in sorted(pieces, key=lambda piece: (-piece[0], piece[1], piece[2])):
        load, server = loads[0]
        heapreplace(loads, (load + numel, server))
        placed.append((order, start, stop, Shard(server, name, start, stop)))
    return _merged([shard for *_, shard in sorted(placed, key=lambda place: place[:3])])


def of_server(plan: Plan, server: int) -> tuple[Shard, ...]:
    """The shards that `server` owns, in the order of `assign`."""
    return tuple(shard for shard in assign(plan) if shard.server == server)


def server_bytes(plan: Plan) -> tuple[int, ...]:
    """Bytes of weights that each server owns."""
    size = BYTES[plan.precision.stored]
    parameters = plan.spec.parameters
    loads = [0] * plan.servers
    for shard in assign(plan):
        loads[shard.server] += size * shard.numel(parameters[shard.name])
    return tuple(loads)


def imbalance(plan: Plan) -> float:
    """Bytes of the fullest server over the mean: 1.0 is even."""
    loads = server_bytes(plan)
    return max(loads) * len(loads) / sum(loads)


def _pieces(
    order: int, parameter: ParameterSpec, way: ParameterServerWay, size: int
) -> list[tuple[int, int, int, int, str]]:
    """(elements, parameter's order, start, stop, name) of each piece of one parameter."""
    rows, numel = num_rows(parameter), prod(parameter.shape)
    parts = max(1, min(way.servers, rows, numel * size // max(1, way.shard_min_bytes)))
    ranges = [chunk_range(rows, parts, index) for index in range(parts)]
    return [
        (numel // max(1, rows) * (stop - start), order, start, stop, parameter.name)
        for start, stop in ranges
        if stop > start
    ]


def _merged(shards: list[Shard]) -> tuple[Shard, ...]:
    """Neighbouring rows on one server as one shard."""
    out: list[Shard] = []
    for shard in shards:
        last = out[-1] if out else None
        if last and (last.name, last.server, last.stop) == (shard.name, shard.server, shard.start):
            out[-1] = Shard(last.server, last.name, last.start, shard.stop)
        else:
            out.append(shard)
    return tuple(out)
