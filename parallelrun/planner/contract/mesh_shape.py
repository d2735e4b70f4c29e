"""MeshShape: arithmetic on ranks, axes and coordinates. `parallelrun.distributed.mesh` creates process
groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod


@dataclass(frozen=True)
class MeshShape:
    """The worker ranks 0..W-1 laid out on named mesh dims, slowest first.

    mesh_dims: ordered (axis, degree), for example (("pp", 2), ("dp", 2), ("tp", 2)); the last varies fastest.
    flattened: axes that combine mesh dims, slowest first, for example ("dp", ("dp_replicate", "dp_shard")) for HSDP or
    ("tp", ("tp_kv", "tp_copy")) for replicated kv heads. An axis without an entry has degree 1 and coordinate 0.
    """

    mesh_dims: tuple[tuple[str, int], ...]
    flattened: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Degree of every mesh dim and flattened dim."""
        sizes = dict(self.mesh_dims)
        for axis, parts in self.flattened:
            sizes[axis] = prod(sizes.get(part, 1) for part in parts)
        return sizes

    @cached_property
    def mesh_dim_names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.mesh_dims)

    @cached_property
    def _parts(self) -> dict[str, tuple[str, ...]]:
        return dict(self.flattened)

    @property
    def num_ranks(self) -> int:
        return prod(degree for _, degree in self.mesh_dims)

    def size(self, axis: str) -> int:
        """Degree of `axis`; 1 for an axis this mesh does not have."""
        return self.sizes.get(axis, 1)

    def mesh_dims_of(self, axis: str) -> tuple[str, ...]:
        """The mesh dims of a flattened dim; for a mesh dim, itself."""
        return self._parts.get(axis, (axis,))

    def coordinate(self, rank: int) -> dict[str, int]:
        """The coordinate of `rank` on every mesh dim and flattened dim."""
        assert 0 <= rank < self.num_ranks, f"rank {rank} is not a worker of {self}"
        coordinate: dict[str, int] = {}
        for name, degree in reversed(self.mesh_dims):
            rank, coordinate[name] = divmod(rank, degree)
        for axis, parts in self.flattened:
            index = 0
            for part in parts:
                index = index * self.size(part) + coordinate.get(part, 0)
            coordinate[axis] = index
        return coordinate

    def rank(self, **coordinate: int) -> int:
        """The rank at a coordinate given on mesh dims or flattened dims; axes left out are 0."""
        for axis, parts in self.flattened:
            if axis in coordinate:
                index = coordinate.pop(axis)
                for part in reversed(parts):
                    index, coordinate[part] = divmod(index, self.size(part))
        number = 0
        for name, degree in self.mesh_dims:
            assert coordinate.get(name, 0) < degree, f"{name}={coordinate[name]} is outside its degree {degree}"
            number = number * degree + coordinate.get(name, 0)
        return number

    def groups(self, *axes: str) -> Iterator[tuple[int, ...]]:
        """The groups of ranks that differ only on `axes`, in mesh order; they partition the mesh."""
        varying = {mesh_dim for axis in axes for mesh_dim in self.mesh_dims_of(axis)}
        fixed = [[(name, i) for i in range(degree)] for name, degree in self.mesh_dims if name not in varying]
        moving = [[(name, i) for i in range(degree)] for name, degree in self.mesh_dims if name in varying]
        for rest in product(*fixed):
            yield tuple(self.rank(**dict(rest), **dict(move)) for move in product(*moving))

    def group_of(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The ranks that share every coordinate with `rank` except those on `axes`, in mesh order."""
        coordinate = self.coordinate(rank)
        varying = {mesh_dim for axis in axes for mesh_dim in self.mesh_dims_of(axis)}
        members, stride = [rank], 1
        for name, degree in reversed(self.mesh_dims):
            if name in varying:  # members already vary over the faster mesh dims
                first = members[0] - coordinate[name] * stride
                offsets = [member - members[0] for member in members]
                members = [first + i * stride + offset for i in range(degree) for offset in offsets]
            stride *= degree
        return tuple(members)
