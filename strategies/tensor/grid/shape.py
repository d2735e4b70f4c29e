"""How tp ranks form a grid or a cube: the degrees of its axes, and the nearest legal values where they form none.

The last axis varies fastest, so that a row of the grid is made of neighbouring ranks. Torch-free.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from math import isqrt
from typing import Any, ClassVar

from parallelrun.errors import Problem
from parallelrun.plan.request import Request
from parallelrun.wording import divisors, either, nearest

from .keys import GridConfig

Grid = tuple[int, int]
FARTHEST = 20_000  # distance from the tp asked for up to which legal ones are looked for
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

    sets = ("grid",)

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
            return "depth", f"tp={tp} does not divide by depth={depth}"
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


@dataclass(frozen=True)
class Fixes:
    """Legal values near those of a request. fits: whether the model's sizes divide on the grid of a request."""

    shape: type[Shape]
    request: Request
    fits: Callable[[Request], bool]

    def check(self) -> list[Problem]:
        """Return what is wrong with a tp that cannot be arranged, with the nearest values that can."""
        tensor, grid = GridConfig.of(self.request.config), None
        try:
            grid = read_grid(tensor.grid)
        except ValueError as error:
            return [Problem(str(error), "grid", self.grid() or "leave grid out", kind="arithmetic")]
        where, what = self.shape.broken_rule(self.request.tp, grid, tensor.depth)
        fix = " or ".join(filter(None, [either("tp", self.tp()), self.grid(), self._depth(), *self._world()]))
        if not fix:  # no one value would do
            free = replace(self, request=self._with(**dict.fromkeys(self.shape.sets)))
            fix = f"{either('tp', free.tp())} without grid and depth"
        return [Problem(what, where, fix, kind="arithmetic")]

    def tp(self) -> list[int]:
        """Return the two tp nearest to the one asked for that grid and depth allow and that fit; 1 only if there is no
        other."""
        alone = [1] if self._is_legal(replace(self.request, tp=1)) else []
        return sorted(islice(self._legal_tp(), 2)) or alone

    def grid(self) -> str:
        """Return the grid nearest to a square that makes tp, at the depth asked for."""
        if "grid" not in self.shape.sets:
            return ""
        tp, depths = self.request.tp, self.shape.depths(self.request.tp, GridConfig.of(self.request.config).depth)
        possible = [(rows, tp // deep // rows) for deep in depths for rows in divisors(tp // deep)]
        possible.sort(key=lambda grid: abs(grid[0] - grid[1]))  # of two alike the wide one comes first
        texts = (f"{rows}x{columns}" for rows, columns in possible)
        return next((f"grid={text}" for text in texts if self._is_legal(self._with(grid=text))), "")

    def _depth(self) -> str:
        """The depths that make tp, at the grid asked for."""
        depth = GridConfig.of(self.request.config).depth
        if depth is None:
            return ""
        legal = [deep for deep in divisors(self.request.tp) if self._is_legal(self._with(depth=deep))]
        return either("depth", nearest(depth, legal))

    def _world(self) -> list[str]:
        """Where tp took what was left of a world: other degrees in this world, and other worlds."""
        request, ranks = self.request, self.request.dp * self.request.tp
        if request.config.tp is not None:
            return []
        left = sorted(islice(self._legal_tp(dividing=ranks), 2), reverse=True)
        fixes = [either("dp", [ranks // tp for tp in left])]
        if request.config.world is not None:
            fixes.append(either("world", [tp * request.pp * request.dp for tp in self.tp()]))
        return fixes

    def _legal_tp(self, dividing: int = 0) -> Iterator[int]:
        """Legal tp above 1, the nearest first. dividing: only the divisors of so many ranks."""
        tp = self.request.tp
        for distance in range(min(FARTHEST, 4 * max(tp, 8))):
            for candidate in dict.fromkeys((tp - distance, tp + distance)):
                in_range = 1 < candidate <= 4 * max(tp, 8) and dividing % candidate == 0
                if in_range and self._is_legal(replace(self.request, tp=candidate)):
                    yield candidate

    def _is_legal(self, request: Request) -> bool:
        return self.shape.arranged(request) is not None and self.fits(request)

    def _with(self, **settings: Any) -> Request:
        """The request with other settings of the tensor strategy."""
        config, strategy = self.request.config, self.request.config.strategy
        strategy = replace(strategy, tensor=replace(strategy.tensor, **settings))
        return replace(self.request, config=replace(config, strategy=strategy))
