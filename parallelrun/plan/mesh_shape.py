"""MeshShape: ranks, axes and coordinates as arithmetic. Torch-free; `mesh` turns it into process groups."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod


@dataclass(frozen=True)
class MeshShape:
    """The worker ranks 0..W-1 laid out on named mesh dims, slowest first.

    leaves: ordered (axis, degree), for example (("pp", 2), ("dp", 2), ("tp", 2)); the last varies fastest.
    factors: an axis made of leaves, major first, for example ("dp", ("dp_replicate", "dp_shard")) for HSDP or
    ("tp", ("tp_kv", "tp_copy")) for kv-head replication. An axis that is not named has degree 1 and coordinate 0.
    """

    mesh_dims: tuple[tuple[str, int], ...]
    flattened: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Degree of every axis, leaves and flattened ones."""
        sizes = dict(self.mesh_dims)
        for axis, parts in self.flattened:
            sizes[axis] = prod(sizes.get(part, 1) for part in parts)
        return sizes

    @cached_property
    def mesh_dim_names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.mesh_dims)

    @property
    def num_ranks(self) -> int:
        return prod(degree for _, degree in self.mesh_dims)

    def size(self, axis: str) -> int:
        """Degree of `axis`; 1 for an axis this mesh does not have."""
        return self.sizes.get(axis, 1)

    def mesh_dims_of(self, axis: str) -> tuple[str, ...]:
        """The leaves that `axis` is made of: itself, unless it is factored."""
        return dict(self.flattened).get(axis, (axis,))

    def coordinate(self, rank: int) -> dict[str, int]:
        """Place of `rank` on every axis, leaves and flattened ones."""
        assert 0 <= rank < self.num_ranks, f"rank {rank} is not a worker of {self}"
        place: dict[str, int] = {}
        for name, degree in reversed(self.mesh_dims):
            rank, place[name] = divmod(rank, degree)
        for axis, parts in self.flattened:
            index = 0
            for part in parts:
                index = index * self.size(part) + place.get(part, 0)
            place[axis] = index
        return place

    def rank(self, **coordinate: int) -> int:
        """The rank at a coordinate given on mesh dims or flattened dims; axes left out are 0."""
        place = dict(coordinate)
        for axis, parts in self.flattened:
            if axis in place:
                index = place.pop(axis)
                for part in reversed(parts):
                    index, place[part] = divmod(index, self.size(part))
        number = 0
        for name, degree in self.mesh_dims:
            assert place.get(name, 0) < degree, f"{name}={place.get(name)} is outside its degree {degree}"
            number = number * degree + place.get(name, 0)
        return number

    def groups(self, *axes: str) -> Iterator[tuple[int, ...]]:
        """The rank groups that vary over `axes` (in mesh order), every other leaf fixed: they partition the mesh."""
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
            if name in varying:  # faster leaves have been laid out already: this one is slower than they
                first = members[0] - coordinate[name] * stride
                offsets = [member - members[0] for member in members]
                members = [first + i * stride + offset for i in range(degree) for offset in offsets]
            stride *= degree
        return tuple(members)
