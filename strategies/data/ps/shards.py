"""The rows of each parameter that each server owns, and which elements of them each rank of a worker pushes and pulls.
Every rank derives the same answer from the plan.

Placing whole tensors round-robin leaves servers unbalanced (tensorflow#45291). Large tensors are therefore cut, as by
TensorFlow's MinSizePartitioner, and each piece goes to the least loaded server, largest first (Graham 1969).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from heapq import heappop, heappush
from math import prod
from typing import NamedTuple

from parallelrun.base.layout import chunk_range
from parallelrun.planner.contract.parameters import HeldParameter, held_parameters, owns
from parallelrun.planner.contract.plan import Plan
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


@dataclass(frozen=True)
class ShardPiece:
    """The elements that a server's shard and one rank's part of the same parameter have in common.

    number: the shard's among those of its server. box, part: [start, stop) per dim of these elements, and of the rank's
    part, in the logical tensor.
    """

    number: int
    shard: Shard
    parameter: HeldParameter
    box: tuple[tuple[int, int], ...]
    part: tuple[tuple[int, int], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.box)

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @cached_property
    def in_shard(self) -> tuple[slice, ...]:
        """Where the elements are in the shard, whose rows are complete."""
        firsts = (self.shard.start, *(0 for _ in self.box[1:]))
        return tuple(slice(start - first, stop - first) for (start, stop), first in zip(self.box, firsts))

    @cached_property
    def in_part(self) -> tuple[slice, ...]:
        """Where the elements are in the rank's tensor."""
        return tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(self.box, self.part))


def pieces(plan: Plan, rank: int, shards: Sequence[Shard]) -> tuple[list[ShardPiece], list[ShardPiece]]:
    """(the pieces of `shards` that a rank of a worker pushes, those that it pulls), in the order of shards.

    A rank pulls all that it holds. Of the ranks of a worker that hold the same elements (norms under tp, tied copies,
    the ranks of a sequence) one pushes them, so that a worker pushes each element once, as a worker of one rank does.
    """
    mesh, coordinate = plan.mesh, plan.mesh.coordinate(rank)
    in_first = coordinate | dict.fromkeys(mesh.mesh_dims_of(plan.worker_axis), 0)  # that rank in the first worker
    held = {parameter.spec.name: parameter for parameter in held_parameters(plan, coordinate["pp"])}
    parts = {n: p.layout.ranges(p.spec.shape, mesh.sizes, coordinate) for n, p in held.items()}
    pulled = []
    for number, shard in enumerate(shards):
        if shard.name in held:
            part = parts[shard.name]
            rows = [(max(shard.start, start), min(shard.stop, stop)) for start, stop in part[:1]]
            box = (*rows, *part[1:])
            if all(start < stop for start, stop in box):
                pulled.append(ShardPiece(number, shard, held[shard.name], box, part))
    owned = {n: not p.shared and owns(p.layout, mesh, in_first) for n, p in held.items()}
    return [piece for piece in pulled if owned[piece.shard.name]], pulled
