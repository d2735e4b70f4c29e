"""Which equal part of a dim a rank has, when several axes split it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from parallelrun.mesh import Mesh


@dataclass(frozen=True)
class EvenSlice:
    """EvenSlice `index` of `count`."""

    index: int
    count: int

    def of(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """This part of what is whole along `dim`: a view."""
        size, rest = divmod(tensor.size(dim), self.count)
        assert rest == 0, f"dim {dim} of {tuple(tensor.shape)} does not divide by {self.count}"
        return tensor.narrow(dim, self.index * size, size)


def slice_of(axes: tuple[str, ...], mesh: Mesh) -> EvenSlice:
    """This rank's part of a dim that `axes` split, major first."""
    index, count = 0, 1
    for axis in axes:
        degree = mesh.shape.size(axis)
        index, count = index * degree + mesh.coordinate.get(axis, 0), count * degree
    return EvenSlice(index, count)
