"""How tp ranks form a grid or a cube: the degrees of its axes, and the rule that is broken where they form none.

The last axis varies fastest, so that a row of the grid is made of neighbouring ranks.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from math import isqrt
from typing import ClassVar

from parallelrun.planner.contract.request import Request

from ..common.keys import GridConfig

Grid = tuple[int, int]
_GRID = re.compile(r"([1-9][0-9]{0,6})x([1-9][0-9]{0,6})")


def read_grid(text: str | None) -> Grid | None:
    """Return (rows, columns) of `2x3`; None if nothing is given. Raises ValueError for anything else."""
    if text is None:
        return None
    match = _GRID.fullmatch(str(text).strip().lower())
    if not match:
        raise ValueError(f"grid={text} is not rows x columns, such as 2x3")
    return int(match[1]), int(match[2])


def cube_root(number: int) -> int:
    """Rounded down."""
    root: int = round(number ** (1 / 3))  # exact enough: degrees are below 2^20
    return root if root**3 <= number else root - 1


def shown(sizes: dict[str, int]) -> str:
    """`row 2 x col 3`."""
    return " x ".join(f"{axis} {degree}" for axis, degree in sizes.items())


class Shape(ABC):
    """The arrangements of tp ranks that a layout allows. sets: the keys that the user may choose one by."""

    sets: ClassVar[tuple[str, ...]] = ()

    @classmethod
    @abstractmethod
    def arrange(cls, tp: int, grid: Grid | None, depth: int | None) -> dict[str, int] | None:
        """Return the degree of every axis, in mesh order, or None where `tp` ranks cannot be arranged so."""

    @classmethod
    @abstractmethod
    def broken_rule(cls, tp: int, grid: Grid | None, depth: int | None) -> tuple[str, str]:
        """Return (the key that is wrong, the rule that it breaks, with its numbers) where `arrange` gives None."""

    @classmethod
    def depths(cls, tp: int, depth: int | None) -> Iterable[int]:
        """Return the possible depths, largest first."""
        return (1,)

    @classmethod
    def arranged(cls, request: Request) -> dict[str, int] | None:
        """Return the degree of every tensor axis; None where the grid is unreadable or does not make tp."""
        tensor = GridConfig.of(request.config)
        try:
            return cls.arrange(request.tp, read_grid(tensor.grid), tensor.depth)
        except ValueError:
            return None


class Square(Shape):
    """2d: row x col, square if no grid is given."""

    sets: ClassVar[tuple[str, ...]] = ("grid",)

    @classmethod
    def arrange(cls, tp: int, grid: Grid | None, depth: int | None) -> dict[str, int] | None:
        """No grid is deeper than its sides are long. A depth of 1 is no axis."""
        for deep in cls.depths(tp, depth):
            rows, columns = grid or (isqrt(tp // deep),) * 2
            if deep * rows * columns == tp and deep <= min(rows, columns):
                return {**({"depth": deep} if deep > 1 else {}), "row": rows, "col": columns}
        return None

    @classmethod
    def broken_rule(cls, tp: int, grid: Grid | None, depth: int | None) -> tuple[str, str]:
        if grid:
            return "grid", f"grid={grid[0]}x{grid[1]} = {grid[0] * grid[1]} ranks, and tp={tp}"
        return "tp", f"tp={tp} does not fit layout=2d, which needs a square tp (4, 9, 16, ...) unless grid is set"


class Deep(Square):
    """2.5d: depth x row x col. An unset depth is the largest that does not exceed a side of the grid."""

    sets = ("grid", "depth")

    @classmethod
    def depths(cls, tp: int, depth: int | None) -> Iterable[int]:
        if depth is not None:
            return (depth,) if depth >= 1 and tp % depth == 0 else ()
        return (deep for deep in range(cube_root(tp), 0, -1) if tp % deep == 0)

    @classmethod
    def broken_rule(cls, tp: int, grid: Grid | None, depth: int | None) -> tuple[str, str]:
        rows, columns = grid or (isqrt(tp // (depth or 1)),) * 2
        if depth is None and grid:
            deepest = f"at most {min(grid)} deep, because no grid is deeper than its sides"
            return "grid", f"tp={tp} is not made of grids of {rows}x{columns} = {rows * columns} ranks, {deepest}"
        if depth is None:
            rule = "depth x q x q ranks with depth at most q (4, 8, 9, ...)"
            return "tp", f"tp={tp} does not fit layout=2.5d, which needs {rule}"
        if depth * rows * columns == tp:
            return "depth", f"depth={depth} exceeds the grid's side of {min(rows, columns)} (tp={tp})"
        if grid:
            return "grid", f"depth={depth} x grid={rows}x{columns} = {depth * rows * columns} ranks, and tp={tp}"
        if tp % depth:
            return "depth", f"tp={tp} is not divisible by depth={depth}"
        return "depth", f"tp={tp} / depth={depth} = {tp // depth} ranks are no square grid"


class Cube(Shape):
    """3d: x x y x z, all equal."""

    @classmethod
    def arrange(cls, tp: int, grid: Grid | None, depth: int | None) -> dict[str, int] | None:
        side = cube_root(tp)
        return dict.fromkeys("xyz", side) if side**3 == tp else None

    @classmethod
    def broken_rule(cls, tp: int, grid: Grid | None, depth: int | None) -> tuple[str, str]:
        return "tp", f"tp={tp} does not fit layout=3d, which needs a cube of ranks (8, 27, 64, ...)"
