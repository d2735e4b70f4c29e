"""Which tp a grid can be made of: what is wrong with the one asked for, and the nearest that are right. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from math import isqrt
from typing import Any

from parallelrun.errors import Problem
from parallelrun.plan.request import Request
from parallelrun.wording import divisors, either, nearest

from . import axes
from .axes import Grid, cube_root

Fits = Callable[[Request], bool]
SIDES = 64  # sides tried below and above the nearest


def grid_of(request: Request) -> Grid | None:
    """The grid asked for; None if none is, or it cannot be read (`check` says so)."""
    try:
        return axes.read_grid(request.config.strategy.tensor.grid)
    except ValueError:
        return None


def arranged(request: Request) -> dict[str, int] | None:
    """Degree of every tensor axis; None where the grid is unreadable or does not make tp."""
    tensor = request.config.strategy.tensor
    grid = grid_of(request)
    if tensor.kind != "3d" and tensor.grid is not None and grid is None:
        return None
    return axes.arrange(tensor.kind, request.tp, grid, tensor.depth)


def shown(sizes: dict[str, int]) -> str:
    """`row 2 x col 3`."""
    return " x ".join(f"{axis} {degree}" for axis, degree in sizes.items())


def filled(request: Request) -> tuple[str, ...]:
    """`grid=2x2 depth=2 (filled: tp 8, the largest legal depth)`: what of it was not given."""
    tensor, sizes = request.config.strategy.tensor, arranged(request)
    if request.tp == 1 or tensor.kind == "3d" or not sizes:
        return ()
    values = [] if tensor.grid else [f"grid={sizes['row']}x{sizes['col']}"]
    why = f"tp {request.tp}"
    if tensor.kind == "2.5d" and tensor.depth is None:
        values.append(f"depth={sizes.get('depth', 1)}")
        why += ", the largest legal depth"
    return (f"{' '.join(values)} (filled: {why})",) if values else ()


def near(request: Request, fits: Fits) -> list[int]:
    """The two tp nearest to the one asked for that grid and depth allow and that fit; 1 only if there is no other."""
    alone = [1] if _is_legal(replace(request, tp=1), fits) else []
    return sorted(islice(_nearest(request, fits), 2)) or alone


def _nearest(request: Request, fits: Fits, dividing: int = 0) -> Iterator[int]:
    """Those tp, the nearest first. dividing: only the divisors of so many ranks."""
    tensor, tp = request.config.strategy.tensor, request.tp
    possible = {n for n in _legal(tensor.kind, tp, grid_of(request), tensor.depth) if 1 < n <= 4 * max(tp, 8)}
    for candidate in sorted(possible, key=lambda n: (abs(n - tp), n)):
        if dividing % candidate == 0 and _is_legal(replace(request, tp=candidate), fits):
            yield candidate


def _legal(kind: str, tp: int, grid: Grid | None, depth: int | None) -> Iterator[int]:
    if kind == "3d":
        yield from (side**3 for side in _sides(cube_root(tp)))
        return
    deepest = min(grid) if grid else cube_root(4 * tp)
    depths = (1,) if kind == "2d" else (depth,) if depth else range(1, deepest + 1)
    for deep in depths:
        if grid:
            yield deep * grid[0] * grid[1]
        else:
            yield from (deep * side**2 for side in _sides(isqrt(tp // deep)) if side >= deep)


def _sides(middle: int) -> range:
    return range(max(1, middle - SIDES), middle + SIDES + 1)


def check(request: Request, fits: Fits) -> list[Problem]:
    """What is wrong with a tp that cannot be laid out. fits: do the model's sizes divide on the grid of a request?"""
    tensor, tp = request.config.strategy.tensor, request.tp
    if tensor.kind != "3d":
        try:
            axes.read_grid(tensor.grid)
        except ValueError as error:
            fix = grids(request, fits) or "leave grid out"
            return [Problem(str(error), "grid", fix, kind="arithmetic")]
    where, what = _wrong(tensor.kind, tp, grid_of(request), tensor.depth)
    fixes = [either("tp", near(request, fits)), grids(request, fits), _depths(request, fits), *_worlds(request, fits)]
    fix = " or ".join(filter(None, fixes))
    if not fix:  # no one value would do
        free = _shaped(request, grid=None, depth=None)
        fix = f"{either('tp', near(free, fits))} without grid and depth"
    return [Problem(what, where, fix, kind="arithmetic")]


def _shaped(request: Request, **changed: Any) -> Request:
    """The request with another grid or depth."""
    strategy = request.config.strategy
    tensor = replace(strategy.tensor, **changed)
    return replace(request, config=replace(request.config, strategy=replace(strategy, tensor=tensor)))


def _wrong(kind: str, tp: int, grid: Grid | None, depth: int | None) -> tuple[str, str]:
    """(the key that is wrong, the rule that it breaks, with its numbers)."""
    if kind == "3d":
        return "tp", f"tp={tp} is no cube, and layout=3d lays ranks out as l x l x l"
    if kind == "2d":
        if grid:
            return "grid", f"grid={grid[0]}x{grid[1]} = {grid[0] * grid[1]} ranks, and tp={tp}"
        return "tp", f"tp={tp} is no square, and layout=2d lays ranks out as q x q where no grid is given"
    if depth is None:
        if grid:
            deepest = f"at most {min(grid)} deep, for no grid is deeper than its sides"
            return "grid", f"tp={tp} is not made of grids of {grid[0]}x{grid[1]} = {grid[0] * grid[1]} ranks, {deepest}"
        return "tp", f"tp={tp} is no depth x q x q with depth at most q, as layout=2.5d lays ranks out"
    rows, columns = grid or (isqrt(tp // depth),) * 2
    if depth * rows * columns == tp:
        return "depth", f"depth={depth} exceeds the grid's side of {min(rows, columns)} (tp={tp})"
    if grid:
        return "grid", f"depth={depth} x grid={rows}x{columns} = {depth * rows * columns} ranks, and tp={tp}"
    if tp % depth:
        return "depth", f"tp={tp} does not divide by depth={depth}"
    return "depth", f"tp={tp} / depth={depth} = {tp // depth} ranks are no square grid"


def grids(request: Request, fits: Fits) -> str:
    """The grid nearest to a square that makes tp, at the depth asked for."""
    tensor, tp = request.config.strategy.tensor, request.tp
    if tensor.kind == "3d":
        return ""
    depths = (1,) if tensor.kind == "2d" else (tensor.depth,) if tensor.depth else range(cube_root(tp), 0, -1)
    possible = [(rows, tp // deep // rows) for deep in depths if tp % deep == 0 for rows in divisors(tp // deep)]
    possible.sort(key=lambda grid: abs(grid[0] - grid[1]))  # of two alike the wide one comes first
    texts = (f"{rows}x{columns}" for rows, columns in possible)
    return next((f"grid={text}" for text in texts if _is_legal(_shaped(request, grid=text), fits)), "")


def _depths(request: Request, fits: Fits) -> str:
    """The depths that make tp, at the grid asked for."""
    tensor = request.config.strategy.tensor
    if tensor.kind != "2.5d" or tensor.depth is None:
        return ""
    legal = [d for d in divisors(request.tp) if _is_legal(_shaped(request, depth=d), fits)]
    return either("depth", nearest(tensor.depth, legal))


def _is_legal(request: Request, fits: Fits) -> bool:
    return arranged(request) is not None and fits(request)


def _worlds(request: Request, fits: Fits) -> list[str]:
    """Where tp took what was left of a world: other degrees in this one, and other worlds."""
    config, ranks = request.config, request.dp * request.tp
    if config.tp is not None:
        return []
    left = sorted(islice(_nearest(request, fits, dividing=ranks), 2), reverse=True)
    fixes = [either("dp", [ranks // tp for tp in left])]
    if config.world is not None:
        fixes.append(either("world", [tp * request.pp * request.dp for tp in near(request, fits)]))
    return fixes
