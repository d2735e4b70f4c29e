"""The rows of each parameter that each server owns. Every rank derives the same answer from the plan.

Placing whole tensors round-robin leaves servers unbalanced (tensorflow#45291). Large tensors are therefore cut, as by
TensorFlow's MinSizePartitioner, and each piece goes to the least loaded server, largest first (Graham 1969).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush
from math import prod
from typing import NamedTuple

from parallelrun.base.layout import chunk_range
from parallelrun.planner.model.model_spec import ModelSpec, ParameterSpec

FINEST = 16  # no piece is below 1/16 of a server's fair share: smaller ones hardly improve the balance


@dataclass(frozen=True)
class Shard:
    """Rows [start, stop) of dim 0 of a logical parameter. A scalar has one row."""

    parameter: ParameterSpec
    start: int
    stop: int

    @property
    def name(self) -> str:
        return self.parameter.name

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.stop - self.start, *self.parameter.shape[1:]) if self.parameter.shape else ()

    @property
    def numel(self) -> int:
        return prod(self.shape)


def num_rows(parameter: ParameterSpec) -> int:
    """Length of dim 0; 1 for a scalar."""
    return parameter.shape[0] if parameter.shape else 1


def cut(spec: ModelSpec, servers: int, min_bytes: int, element_size: int) -> list[Shard]:
    """Cut all trained parameters, in order, into at most one piece per server, none below `min_bytes` if possible."""
    trained = [parameter for parameter in spec.parameters.values() if not parameter.frozen]
    fair_share = sum(parameter.numel for parameter in trained) * element_size / servers
    smallest = max(1, min_bytes, fair_share / FINEST)
    pieces: list[Shard] = []
    for parameter in trained:
        rows = num_rows(parameter)
        parts = max(1, min(servers, rows, int(parameter.numel * element_size / smallest)))
        ranges = (chunk_range(rows, parts, index) for index in range(parts))
        pieces += [Shard(parameter, start, stop) for start, stop in ranges if stop > start]
    return pieces


class Sharding(NamedTuple):
    """The shards of each server, in the order of parameters and rows, and their bytes of weights."""

    of_server: tuple[tuple[Shard, ...], ...]
    num_bytes: tuple[int, ...]

    @property
    def imbalance(self) -> float:
        """Bytes of the fullest server over the mean; 1.0 is even."""
        return max(self.num_bytes) * len(self.num_bytes) / sum(self.num_bytes)


@lru_cache(maxsize=4)
def assign(spec: ModelSpec, servers: int, min_bytes: int, element_size: int) -> Sharding:
    """Assign each row of each trained parameter to one server.

    A server owns at most one shard of a parameter. Frozen parameters are on no server.
    """
    pieces = cut(spec, servers, min_bytes, element_size)
    heap = [(0, server) for server in range(servers)]  # (elements, server)
    owners: dict[str, set[int]] = defaultdict(set)
    indices: list[list[int]] = [[] for _ in range(servers)]  # of the pieces of each server
    for index in sorted(range(len(pieces)), key=lambda index: -pieces[index].numel):
        skipped = []
        while heap[0][1] in owners[pieces[index].name]:
            skipped.append(heappop(heap))
        load, server = heappop(heap)
        for entry in (*skipped, (load + pieces[index].numel, server)):
            heappush(heap, entry)
        owners[pieces[index].name].add(server)
        indices[server].append(index)
    of_server = tuple(tuple(pieces[index] for index in sorted(own)) for own in indices)
    return Sharding(of_server, tuple(element_size * sum(shard.numel for shard in own) for own in of_server))
