"""How tp ranks form a grid or a cube: the degrees of its axes, and the rule that is broken where they form none.

The last axis varies fastest, so that a row of the grid is made of neighbouring ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import isqrt

from parallelrun.planner.contract.request import Request

from ..common.keys import GridConfig

Grid = tuple[int, int]
_GRID = re.compile(r"([1-9][0-9]{0,6})x([1-9][0-9]{0,6})")
KEYS = {"2d": ("grid",), "2.5d": ("grid", "depth"), "3d": ()}  # by which the user may choose among shapes
RULES = {
    "2d": "a square tp (4, 9, 16, ...) unless grid is set to rows x columns",
    "2.5d": "depth x rows x columns ranks with depth at most rows and columns (4, 8, ...), square unless grid is set",
    "3d": "a cube of ranks (8, 27, 64, ...)",
}


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


def format_sizes(sizes: dict[str, int]) -> str:
    """`row 2 x col 3`."""
    return " x ".join(f"{axis} {degree}" for axis, degree in sizes.items())


def possible_depths(layout: str, tp: int, depth: int | None) -> Iterable[int]:
    """Return the depths that divide tp, largest first; the requested one alone if it does."""
    if layout != "2.5d":
        return (1,)
    candidates = range(cube_root(tp), 0, -1) if depth is None else (depth,)
    return [candidate for candidate in candidates if candidate >= 1 and tp % candidate == 0]


def arrange(layout: str, tp: int, grid: Grid | None, depth: int | None) -> dict[str, int] | None:
    """Return the degree of every axis, in mesh order, or None where `tp` ranks cannot be arranged so.

    A grid is square if none is given, and not deeper than its sides. A depth of 1 is no axis. An unset depth is the
    largest legal one.
    """
    if layout == "3d":
        side = cube_root(tp)
        return dict.fromkeys("xyz", side) if side**3 == tp else None
    for candidate in possible_depths(layout, tp, depth):
        rows, columns = grid or (isqrt(tp // candidate),) * 2
        if candidate * rows * columns == tp and candidate <= min(rows, columns):
            return {**({"depth": candidate} if candidate > 1 else {}), "row": rows, "col": columns}
    return None


def arrange_request(layout: str, request: Request) -> dict[str, int] | None:
    """Return the degree of every tensor axis; None where the grid is unreadable or does not make tp."""
    tensor = GridConfig.of(request.config)
    try:
        return arrange(layout, request.tp, read_grid(tensor.grid), tensor.depth)
    except ValueError:
        return None


def broken_rule(layout: str, tp: int, grid: Grid | None, depth: int | None) -> tuple[str, str]:
    """Return (the key that is wrong, the rule that it breaks) where `arrange` gives None."""
    settings = [f"grid={grid[0]}x{grid[1]} ({grid[0] * grid[1]} ranks)"] if grid else []
    settings += [f"depth={depth}"] if depth is not None else []
    where = "grid" if grid else "depth" if depth is not None else "tp"
    subject = " with ".join([f"tp={tp}", *[" and ".join(settings)] * bool(settings)])
    return where, f"{subject} does not fit layout={layout}, which needs {RULES[layout]}"
