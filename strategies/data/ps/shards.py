"""Which server owns which rows of which parameter. Torch-free; every rank derives the same answer from the plan.

Placing whole tensors round-robin leaves servers unbalanced (tensorflow#45291). Large tensors are therefore cut, as by
TensorFlow's MinSizePartitioner, and each piece goes to the least loaded server, largest first (Graham 1969).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush
from math import prod

from parallelrun.layout import chunk_range
from parallelrun.model_spec import ModelSpec, ParameterSpec

FINEST = 16  # no piece is below 1/16 of a server's fair share: smaller ones hardly improve the balance


@dataclass(frozen=True)
class Shard:
    """Rows [start, stop) of dim 0 of a logical parameter, owned by `server`. A scalar has one row."""

    server: int
    parameter: ParameterSpec
    start: int
    stop: int

    @property
    def name(self) -> str:
        """One-device name of the parameter."""
        return self.parameter.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of these rows; () for a scalar."""
        return (self.stop - self.start, *self.parameter.shape[1:]) if self.parameter.shape else ()

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


def num_rows(parameter: ParameterSpec) -> int:
    """Length of dim 0; 1 for a scalar."""
    return parameter.shape[0] if parameter.shape else 1


def cut(spec: ModelSpec, servers: int, min_bytes: int, element_size: int) -> list[tuple[ParameterSpec, int, int]]:
    """Pieces (parameter, start row, stop row) of all trained parameters, in order.

    A tensor has at most one piece per server. No piece is smaller than `min_bytes` unless its tensor is.
    """
    trained = [parameter for parameter in spec.parameters.values() if not parameter.frozen]
    fair_share = sum(parameter.numel for parameter in trained) * element_size / servers
    least = max(1, min_bytes, fair_share / FINEST)
    pieces = []
    for parameter in trained:
        rows = num_rows(parameter)
        parts = max(1, min(servers, rows, int(parameter.numel * element_size / least)))
        ranges = (chunk_range(rows, parts, index) for index in range(parts))
        pieces += [(parameter, start, stop) for start, stop in ranges if stop > start]
    return pieces


@lru_cache(maxsize=4)
def assign(spec: ModelSpec, servers: int, min_bytes: int, element_size: int) -> tuple[Shard, ...]:
    """Return the shards of all trained parameters, in the order of parameters and rows: each row on one server.

    A server owns at most one shard of a parameter. Frozen parameters are on no server.
    """
    shards = [Shard(-1, *piece) for piece in cut(spec, servers, min_bytes, element_size)]
    heap = [(0, server) for server in range(servers)]  # (elements, server)
    owners: dict[str, set[int]] = defaultdict(set)
    server_of: dict[int, int] = {}
    for index in sorted(range(len(shards)), key=lambda index: -shards[index].numel):
        shard, skipped = shards[index], []
        while heap[0][1] in owners[shard.name]:
            skipped.append(heappop(heap))
        load, server = heappop(heap)
        for one in (*skipped, (load + shard.numel, server)):
            heappush(heap, one)
        owners[shard.name].add(server)
        server_of[index] = server
    return tuple(Shard(server_of[i], one.parameter, one.start, one.stop) for i, one in enumerate(shards))


@lru_cache(maxsize=4)
def loads(spec: ModelSpec, servers: int, min_bytes: int, element_size: int) -> tuple[int, ...]:
    """Return the bytes of weights that each server owns."""
    found = [0] * servers
    for shard in assign(spec, servers, min_bytes, element_size):
        found[shard.server] += element_size * shard.numel
    return tuple(found)
