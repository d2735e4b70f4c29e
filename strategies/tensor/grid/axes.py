"""The axes of the grid tensor strategies: which tp they can have, and how activations lie between blocks. Torch-free.

2d: row x col. 2.5d: depth x row x col. 3d: x x y x z. The last varies fastest, so a row of the grid lies together.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import isqrt, prod

from parallelrun.plan.structure import Plan
from parallelrun.product import ActivationLayout, Sizes

AXIS = "tp"
_GRID = re.compile(r"([1-9][0-9]{0,6})x([1-9][0-9]{0,6})")

Grid = tuple[int, int]
MeshDims = tuple[tuple[tuple[str, int], ...], tuple[tuple[str, tuple[str, ...]], ...]]


def read_grid(text: str | None) -> Grid | None:
    """(rows, columns) of `2x3`; None if nothing is given. Raises ValueError for anything else."""
    if text is None:
        return None
    match = _GRID.fullmatch(str(text).strip().lower())
    if not match:
        raise ValueError(f"grid={text} is not rows x columns, such as 2x3")
    return int(match[1]), int(match[2])


def arrange(kind: str, tp: int, grid: Grid | None, depth: int | None) -> dict[str, int] | None:
    """Degree of every axis, in mesh order, or None where `tp` cannot be laid out so.

    grid unset: square. depth (2.5d) unset: the largest that does not exceed a side of the grid. A depth of 1 is no
    axis: 2.5d is 2d then.
    """
    if kind == "3d":
        side = cube_root(tp)
        return {"x": side, "y": side, "z": side} if side**3 == tp else None
    for deep in _depths(kind, tp, depth):
        rows, columns = grid or (isqrt(tp // deep),) * 2
        if deep * rows * columns == tp and deep <= min(rows, columns):
            return {**({"depth": deep} if deep > 1 else {}), "row": rows, "col": columns}
    return None


def _depths(kind: str, tp: int, depth: int | None) -> Iterable[int]:
    """The depths that could be, largest first: no grid is deeper than its sides are long."""
    if kind == "2d":
        return (1,)
    if depth is not None:
        return (depth,) if depth >= 1 and tp % depth == 0 else ()
    return (deep for deep in range(cube_root(tp), 0, -1) if tp % deep == 0)


def cube_root(number: int) -> int:
    """Rounded down."""
    root = round(number ** (1 / 3))  # exact enough: degrees are below 2^20
    return root if root**3 <= number else root - 1


def mesh_dims(kind: str, tp: int, grid: Grid | None, depth: int | None) -> MeshDims:
    """(mesh dims with degrees, the factor that makes `tp` of them): see MeshShape."""
    sizes = arrange(kind, tp, grid, depth)
    assert sizes, "checked before"
    return tuple(sizes.items()), ((AXIS, tuple(sizes)),)


def boundary_layout(sizes: Sizes) -> ActivationLayout:
    """How activations lie between blocks: samples over the rows axes, features over the last axis."""
    *rows, features = sizes
    return ActivationLayout(tuple(rows), (features,))


def tensor_sizes(plan: Plan) -> dict[str, int]:
    """Degree of every tensor axis of a plan, in mesh order."""
    return {axis: plan.mesh.size(axis) for axis in plan.mesh.mesh_dims_of(AXIS)}


def boundary_layout_of(plan: Plan) -> ActivationLayout:
    """How activations lie between blocks in this plan."""
    return boundary_layout(tensor_sizes(plan))


def degree(axes: Iterable[str], sizes: Sizes) -> int:
    """Parts that those axes cut a dim into."""
    return prod(sizes.get(axis, 1) for axis in axes)
