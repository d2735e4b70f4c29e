"""How tp ranks form a grid or a cube: the degrees of its axes, what was filled in, and the nearest legal values.

2d: row x col. 2.5d: depth x row x col. 3d: x x y x z. The last axis varies fastest, so that a row of the grid is made
of neighbouring ranks. Torch-free.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from math import isqrt
from typing import Any

from parallelrun.errors import Problem
from parallelrun.plan.request import Request
from parallelrun.wording import divisors, either, nearest

from .keys import GridConfig

Grid = tuple[int, int]
Fits = Callable[[Request], bool]  # whether the model's sizes divide on the grid of a request
SIDES = 64  # sides tried below and above the nearest
_GRID = re.compile(r"([1-9][0-9]{0,6})x([1-9][0-9]{0,6})")


def read_grid(text: str | None) -> Grid | None:
    """Return (rows, columns) of `2x3`; None if nothing is given. Raises ValueError for anything else."""
    if text is None:
        return None
    match = _GRID.fullmatch(str(text).strip().lower())
    if not match:
        raise ValueError(f"grid={text} is not rows x columns, such as 2x3")
    return int(match[1]), int(match[2])


def arrange(kind: str, tp: int, grid: Grid | None, depth: int | None) -> dict[str, int] | None:
    """Return the degree of every axis, in mesh order, or None where `tp` ranks cannot be arranged so.

    grid unset: square. depth (2.5d) unset: the largest that does not exceed a side of the grid. A depth of 1 is no
    axis: 2.5d is 2d then.
    """
    if kind == "3d":
        side = cube_root(tp)
        return {"x": side, "y": side, "z": side} if side**3 == tp else None
    for deep in _possible_depths(kind, tp, depth):
        rows, columns = grid or (isqrt(tp // deep),) * 2
        if deep * rows * columns == tp and deep <= min(rows, columns):
            return {**({"depth": deep} if deep > 1 else {}), "row": rows, "col": columns}
    return None


def _possible_depths(kind: str, tp: int, depth: int | None) -> Iterable[int]:
    """Depths that divide tp, largest first: no grid is deeper than its sides are long."""
    if kind == "2d":
        return (1,)
    if depth is not None:
        return (depth,) if depth >= 1 and tp % depth == 0 else ()
    return (deep for deep in range(cube_root(tp), 0, -1) if tp % deep == 0)


def cube_root(number: int) -> int:
    """Rounded down."""
    root: int = round(number ** (1 / 3))  # exact enough: degrees are below 2^20
    return root if root**3 <= number else root - 1


def asked_grid(request: Request) -> Grid | None:
    """Return the grid asked for; None if none is, or if it cannot be read (`check` says so)."""
    try:
        return read_grid(GridConfig.of(request.config).grid)
    except ValueError:
        return None


def arranged(request: Request) -> dict[str, int] | None:
    """Return the degree of every tensor axis; None where the grid is unreadable or does not make tp."""
    tensor, grid = GridConfig.of(request.config), asked_grid(request)
    if tensor.kind != "3d" and tensor.grid is not None and grid is None:
        return None
    return arrange(tensor.kind, request.tp, grid, tensor.depth)


def shown(sizes: dict[str, int]) -> str:
    """`row 2 x col 3`."""
    return " x ".join(f"{axis} {degree}" for axis, degree in sizes.items())


def filled(request: Request) -> tuple[str, ...]:
    """`grid=2x2 depth=2 (filled: tp 8, the largest legal depth)`: what of it was not given."""
    tensor, sizes = GridConfig.of(request.config), arranged(request)
    if request.tp == 1 or tensor.kind == "3d" or not sizes:
        return ()
    values = [] if tensor.grid else [f"grid={sizes['row']}x{sizes['col']}"]
    why = f"tp {request.tp}"
    if tensor.kind == "2.5d" and tensor.depth is None:
        values.append(f"depth={sizes.get('depth', 1)}")
        why += ", the largest legal depth"
    return (f"{' '.join(values)} (filled: {why})",) if values else ()


def check(request: Request, fits: Fits) -> list[Problem]:
    """Return what is wrong with a tp that cannot be arranged, with the nearest values that can."""
    tensor = GridConfig.of(request.config)
    if tensor.kind != "3d":
        try:
            read_grid(tensor.grid)
        except ValueError as error:
            return [Problem(str(error), "grid", grid_fix(request, fits) or "leave grid out", kind="arithmetic")]
    where, what = _wrong(tensor.kind, request.tp, asked_grid(request), tensor.depth)
    fixes = [either("tp", nearest_tp(request, fits)), grid_fix(request, fits), _depth_fix(request, fits)]
    fix = " or ".join(filter(None, [*fixes, *_world_fixes(request, fits)]))
    if not fix:  # no one value would do
        free = _changed(request, grid=None, depth=None)
        fix = f"{either('tp', nearest_tp(free, fits))} without grid and depth"
    return [Problem(what, where, fix, kind="arithmetic")]


def nearest_tp(request: Request, fits: Fits) -> list[int]:
    """Return the two tp nearest to the one asked for that grid and depth allow and that fit; 1 only if there is no
    other."""
    alone = [1] if _is_legal(replace(request, tp=1), fits) else []
    return sorted(islice(_legal_tp(request, fits), 2)) or alone


def _legal_tp(request: Request, fits: Fits, dividing: int = 0) -> Iterator[int]:
    """Legal tp, the nearest first. dividing: only the divisors of so many ranks."""
    tp = request.tp
    possible = {n for n in _arrangeable(request) if 1 < n <= 4 * max(tp, 8)}
    for candidate in sorted(possible, key=lambda n: (abs(n - tp), n)):
        if dividing % candidate == 0 and _is_legal(replace(request, tp=candidate), fits):
            yield candidate


def _arrangeable(request: Request) -> Iterator[int]:
    """The tp around the one asked for that make a grid of that shape."""
    tensor, tp, grid = GridConfig.of(request.config), request.tp, asked_grid(request)

    def sides(middle: int) -> range:
        return range(max(1, middle - SIDES), middle + SIDES + 1)

    if tensor.kind == "3d":
        yield from (side**3 for side in sides(cube_root(tp)))
        return
    deepest = min(grid) if grid else cube_root(4 * tp)
    depths = (1,) if tensor.kind == "2d" else (tensor.depth,) if tensor.depth else range(1, deepest + 1)
    for deep in depths:
        if grid:
            yield deep * grid[0] * grid[1]
        else:
            yield from (deep * side**2 for side in sides(isqrt(tp // deep)) if side >= deep)


def _changed(request: Request, **settings: Any) -> Request:
    """The request with other settings of the tensor strategy."""
    strategy = request.config.strategy
    tensor = replace(strategy.tensor, **settings)
    return replace(request, config=replace(request.config, strategy=replace(strategy, tensor=tensor)))


def _wrong(kind: str, tp: int, grid: Grid | None, depth: int | None) -> tuple[str, str]:
    """(the key that is wrong, the rule that it breaks, with its numbers)."""
    if kind == "3d":
        return "tp", f"tp={tp} does not fit layout=3d, which needs a cube of ranks (8, 27, 64, ...)"
    if kind == "2d":
        if grid:
            return "grid", f"grid={grid[0]}x{grid[1]} = {grid[0] * grid[1]} ranks, and tp={tp}"
        return (
            "tp",
            f"tp={tp} does not fit layout=2d, which needs a square tp (4, 9, 16, ...) unless grid is set",
        )
    if depth is None:
        if grid:
            deepest = f"at most {min(grid)} deep, because no grid is deeper than its sides"
            return "grid", f"tp={tp} is not made of grids of {grid[0]}x{grid[1]} = {grid[0] * grid[1]} ranks, {deepest}"
        return (
            "tp",
            f"tp={tp} does not fit layout=2.5d, which needs depth x q x q ranks with depth at most q (4, 8, 9, ...)",
        )
    rows, columns = grid or (isqrt(tp // depth),) * 2
    if depth * rows * columns == tp:
        return "depth", f"depth={depth} exceeds the grid's side of {min(rows, columns)} (tp={tp})"
    if grid:
        return "grid", f"depth={depth} x grid={rows}x{columns} = {depth * rows * columns} ranks, and tp={tp}"
    if tp % depth:
        return "depth", f"tp={tp} does not divide by depth={depth}"
    return "depth", f"tp={tp} / depth={depth} = {tp // depth} ranks are no square grid"


def grid_fix(request: Request, fits: Fits) -> str:
    """Return the grid nearest to a square that makes tp, at the depth asked for."""
    tensor, tp = GridConfig.of(request.config), request.tp
    if tensor.kind == "3d":
        return ""
    depths = (1,) if tensor.kind == "2d" else (tensor.depth,) if tensor.depth else range(cube_root(tp), 0, -1)
    possible = [(rows, tp // deep // rows) for deep in depths if tp % deep == 0 for rows in divisors(tp // deep)]
    possible.sort(key=lambda grid: abs(grid[0] - grid[1]))  # of two alike the wide one comes first
    texts = (f"{rows}x{columns}" for rows, columns in possible)
    return next((f"grid={text}" for text in texts if _is_legal(_changed(request, grid=text), fits)), "")


def _depth_fix(request: Request, fits: Fits) -> str:
    """The depths that make tp, at the grid asked for."""
    tensor = GridConfig.of(request.config)
    if tensor.kind != "2.5d" or tensor.depth is None:
        return ""
    legal = [depth for depth in divisors(request.tp) if _is_legal(_changed(request, depth=depth), fits)]
    return either("depth", nearest(tensor.depth, legal))


def _is_legal(request: Request, fits: Fits) -> bool:
    return arranged(request) is not None and fits(request)


def _world_fixes(request: Request, fits: Fits) -> list[str]:
    """Where tp took what was left of a world: other degrees in this world, and other worlds."""
    config, ranks = request.config, request.dp * request.tp
    if config.tp is not None:
        return []
    left = sorted(islice(_legal_tp(request, fits, dividing=ranks), 2), reverse=True)
    fixes = [either("dp", [ranks // tp for tp in left])]
    if config.world is not None:
        fixes.append(either("world", [tp * request.pp * request.dp for tp in nearest_tp(request, fits)]))
    return fixes
