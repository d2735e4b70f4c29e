"""Which server owns which rows of which parameter. Torch-free; every rank derives the same answer from the plan.

Whole variables placed round-robin leave servers unbalanced (tensorflow#45291): large tensors are cut, as
MinSizePartitioner does, and the pieces go to the least loaded server, the largest first (Graham 1969).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heappop, heappush, heapreplace
from math import prod
from typing import NamedTuple

from parallelrun.layout import chunk_range
from parallelrun.model_spec import ModelSpec, ParameterSpec
from parallelrun.plan.structure import Plan
from parallelrun.precision import BYTES

from .settings import ParameterServerWay

FINEST = 16  # no tensor is cut finer than 1/16 of a server's fair share: smaller pieces do not even out much more


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

    What is frozen is on no server. No two shards of a server are of one parameter.
    """
    return _assign(*_case(plan))


def of_server(plan: Plan, server: int) -> tuple[Shard, ...]:
    """The shards that `server` owns, in the order of `assign`."""
    return tuple(shard for shard in assign(plan) if shard.server == server)


def server_bytes(plan: Plan) -> tuple[int, ...]:
    """Bytes of weights that each server owns."""
    return _loads(*_case(plan))


def imbalance(plan: Plan) -> float:
    """Bytes of the fullest server over the mean: 1.0 is even."""
    loads = server_bytes(plan)
    return max(loads) * len(loads) / sum(loads)


def num_pieces(spec: ModelSpec, servers: int, min_bytes: int, size: int) -> int:
    """Into how many pieces all trained parameters are cut. size: of an element, in bytes."""
    return len(_pieces(spec, servers, min_bytes, size))


def _case(plan: Plan) -> tuple[ModelSpec, int, int, int]:
    """All that the shards depend on."""
    strategy = plan.data
    assert isinstance(strategy, ParameterServerWay), f"{strategy.kind} has no servers"
    return plan.spec, strategy.servers, strategy.shard_min_bytes, BYTES[plan.precision.stored]


class _Piece(NamedTuple):
    """Rows [start, stop) of parameter number `order`."""

    order: int
    start: int
    stop: int
    name: str
    numel: int


@lru_cache(maxsize=4)
def _assign(spec: ModelSpec, servers: int, min_bytes: int, size: int) -> tuple[Shard, ...]:
    loads = [(0, server) for server in range(servers)]
    heapify(loads)
    placed: list[tuple[_Piece, int]] = []
    holders: dict[int, set[int]] = {}  # of each parameter: a server saves at most one part of a tensor
    for piece in sorted(_pieces(spec, servers, min_bytes, size), key=lambda piece: (-piece.numel, piece)):
        passed = []
        while loads[0][1] in holders.setdefault(piece.order, set()):
            passed.append(heappop(loads))
        load, server = loads[0]
        heapreplace(loads, (load + piece.numel, server))
        for other in passed:
            heappush(loads, other)
        holders[piece.order].add(server)
        placed.append((piece, server))
    return tuple(Shard(server, piece.name, piece.start, piece.stop) for piece, server in sorted(placed))


@lru_cache(maxsize=4)
def _loads(spec: ModelSpec, servers: int, min_bytes: int, size: int) -> tuple[int, ...]:
    loads = [0] * servers
    for shard in _assign(spec, servers, min_bytes, size):
        loads[shard.server] += size * shard.numel(spec.parameters[shard.name])
    return tuple(loads)


def _pieces(spec: ModelSpec, servers: int, min_bytes: int, size: int) -> list[_Piece]:
    """At most one piece of a tensor per server, none smaller than `min_bytes` unless the tensor is."""
    trained = [parameter for parameter in spec.parameters.values() if not parameter.frozen]
    share = sum(parameter.numel for parameter in trained) * size / servers
    least = max(1, min_bytes, share / FINEST)
    found = []
    for order, parameter in enumerate(trained):
        rows = num_rows(parameter)
        parts = max(1, min(servers, rows, int(parameter.numel * size / least)))
        for start, stop in (chunk_range(rows, parts, index) for index in range(parts)):
            if stop > start:
                numel = parameter.numel // rows * (stop - start)
                found.append(_Piece(order, start, stop, parameter.name, numel))
    return found
