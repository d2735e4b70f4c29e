"""Which tensor layouts are worth comparing at a tp, and what they are called. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt

from parallelrun.plan.structure import Plan
from parallelrun.wording import divisors


@dataclass(frozen=True)
class LayoutChoice:
    """One way of laying a model on the tensor axes. grid: rows x columns, None for square. variant_of: the layout that
    this one is a variant of, with which it is refused. `1d sequence` is 1D with sequence parallelism; `lean` gathers
    operands again in backward."""

    name: str
    kind: str
    sequence_parallel: bool = False
    grid: str | None = None
    depth: int | None = None
    form: str = "auto"
    save_gathered: bool = True
    variant_of: str = ""


ONE_DIMENSIONAL = LayoutChoice("1d", "megatron")


def layouts(tp: int) -> list[LayoutChoice]:
    """Every layout worth a line at this tp, legal or not; 2.5D at each legal depth."""
    rows = max(n for n in divisors(tp) if n * n <= tp)
    square = rows * rows == tp
    flat = f"2d {rows}x{tp // rows}" if rows > 1 else "2d"
    grid = f"{rows}x{tp // rows}" if rows > 1 and not square else None
    depths = [depth for depth in divisors(tp) if depth > 1 and _side(tp // depth) >= depth]
    edge = round(tp ** (1 / 3))
    cube = f"3d {edge}x{edge}x{edge}" if edge**3 == tp else "3d"
    return [
        ONE_DIMENSIONAL,
        LayoutChoice("1d sequence", "megatron", sequence_parallel=True, variant_of="1d"),
        LayoutChoice(flat, "2d", grid=grid),
        LayoutChoice(f"{flat} lean", "2d", grid=grid, save_gathered=False, variant_of=flat),
        LayoutChoice(f"{flat} summa", "2d", grid=grid, form="summa", variant_of=flat),
        *(
            LayoutChoice(f"2.5d {depth}x{_side(tp // depth)}x{_side(tp // depth)}", "2.5d", depth=depth)
            for depth in depths
        ),
        *([] if depths else [LayoutChoice("2.5d", "2.5d", depth=2)]),
        LayoutChoice(cube, "3d"),
        LayoutChoice(f"{cube} lean", "3d", save_gathered=False, variant_of=cube),
    ]


def _side(ranks: int) -> int:
    """Side of the square of that many ranks; 0 if they make none."""
    return isqrt(ranks) if isqrt(ranks) ** 2 == ranks else 0


def layout_name(plan: Plan) -> str:
    """`2d 2x3`, `3d 2x2x2`, `1d`, `1d sequence`: the plan's own layout."""
    if plan.tensor.kind == "megatron":
        return "1d sequence" if plan.tensor.sequence_parallel else "1d"
    degrees = [str(plan.mesh.size(axis)) for axis in plan.mesh.mesh_dims_of("tp")]
    return f"{plan.tensor.kind} {'x'.join(degrees)}"
