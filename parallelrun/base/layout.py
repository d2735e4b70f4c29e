"""Layout: how one logical tensor is sharded, replicated or partial on the mesh axes (OneFlow's SBP, DTensor's
placements). Immutable.

Initialisation, gradient norm, counts, checkpoints, gathers, `verify` and `plan` read layouts; nothing else decides
which part of a tensor a rank holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod


def chunk_range(length: int, num_chunks: int, index: int) -> tuple[int, int]:
    """[start, stop) of chunk `index` of `length` cut into `num_chunks`, as `torch.chunk` does."""
    size = -(-length // num_chunks)
    start = min(index * size, length)
    return start, min(start + size, length)


@dataclass(frozen=True)
class Layout:
    """The axes that shard each tensor dim, and the axes over which its gradient is partial.

    dims: per dim, the axes in order, major first: `(("tp", "dp"), ())` is Shard(0) over tp and each part again over dp;
    dim 1 is not sharded. The tensor is replicated over axes not named. partial: axes over which the tensor's *gradient*
    is a partial sum after backward (sequence-parallel norms, replicated kv heads): it must be all-reduced before use.
    """

    dims: tuple[tuple[str, ...], ...]
    partial: tuple[str, ...] = ()

    @staticmethod
    def replicated(num_dims: int) -> Layout:
        """The layout of a tensor of which every rank has a full copy."""
        return Layout(((),) * num_dims)

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """Every axis that shards the tensor."""
        return tuple(axis for dim in self.dims for axis in dim)

    def split(self, dim: int, axis: str) -> Layout:
        """This layout with `dim` also sharded over `axis`, as its minor-most axis (FSDP2, ZeRO)."""
        dims = list(self.dims)
        dims[dim] = (*dims[dim], axis)
        return Layout(tuple(dims), self.partial)

    def ranges(
        self, shape: tuple[int, ...], sizes: Mapping[str, int], coordinate: Mapping[str, int]
    ) -> tuple[tuple[int, int], ...]:
        """[start, stop) per dim of the part held at `coordinate`. Axes missing from `sizes` have degree 1."""
        assert len(shape) == len(self.dims), f"{shape} has another number of dims than {self.dims}"
        out = []
        for length, axes in zip(shape, self.dims):
            start, stop = 0, length
            for axis in axes:
                first, last = chunk_range(stop - start, sizes.get(axis, 1), coordinate.get(axis, 0))
                start, stop = start + first, start + last
            out.append((start, stop))
        return tuple(out)

    def local_shape(
        self, shape: tuple[int, ...], sizes: Mapping[str, int], coordinate: Mapping[str, int]
    ) -> tuple[int, ...]:
        """Shape of the part held at `coordinate`: the lengths of `ranges`."""
        lengths = []
        for length, axes in zip(shape, self.dims, strict=True):
            for axis in axes:
                if (parts := sizes.get(axis, 1)) > 1:
                    size = -(-length // parts)
                    length = max(0, min(size, length - size * coordinate.get(axis, 0)))
            lengths.append(length)
        return tuple(lengths)

    def edges(self, shape: tuple[int, ...], sizes: Mapping[str, int], axis: str) -> set[int]:
        """The coordinates of `axis` at which the part's shape may differ from the one before: where whole chunks end,
        and behind the shorter one."""
        positions = set()
        for length, axes in zip(shape, self.dims):
            lengths = {length}
            for name in axes:
                chunks = [(longer, -(-longer // sizes.get(name, 1))) for longer in lengths if longer]
                if name == axis:
                    positions |= {longer // size + ahead for longer, size in chunks for ahead in (0, 1)}
                lengths = {length for longer, size in chunks for length in (size, longer % size)}
        return {edge for edge in positions if edge < sizes.get(axis, 1)}

    def local_numel(self, shape: tuple[int, ...], sizes: Mapping[str, int], coordinate: Mapping[str, int]) -> int:
        """Number of elements of the part held at `coordinate`."""
        return prod(self.local_shape(shape, sizes, coordinate))
