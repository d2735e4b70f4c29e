"""The three ways to cut a matrix product Y = X W over ranks, as layouts. Torch-free: what `lesson` computes and prints.

data: each rank has some rows of X and all of W (data parallelism; the data ways). column: all of X, some columns of W
(the first half of Megatron's tensor parallelism). row: some columns of X, the same rows of W (its second half).
"""

from __future__ import annotations

from dataclasses import dataclass

from parallelrun.layout import Layout
from parallelrun.mesh.shape import MeshShape


@dataclass(frozen=True)
class Cut:
    """One way to cut. x, w, y: the layouts of X (rows x inner), W (inner x columns) and Y (rows x columns).

    forward, backward: who must be summed over which axis: `("Y", "tp")` means that each rank has a partial sum of its Y
    and they all-reduce over tp. backward names the gradients, with all of dY known where Y is.
    """

    title: str
    says: str
    x: Layout
    w: Layout
    y: Layout
    forward: tuple[tuple[str, str], ...]
    backward: tuple[tuple[str, str], ...]


def cuts(mesh: MeshShape) -> list[Cut]:
    """What a mesh can show: data parallelism when it has dp > 1, both tensor cuts when it has tp > 1."""
    over_dp = ("dp",) if mesh.size("dp") > 1 else ()
    over_tp = ("tp",) if mesh.size("tp") > 1 else ()
    weight_sum = (("dW", "dp"),) if over_dp else ()
    if not over_tp:
        return [
            Cut(
                "data parallel: rows of X" if over_dp else "one device: nothing is cut",
                "Every rank has all of W and its own rows of X. Forward needs nobody; the gradients of W are summed."
                if over_dp
                else "One rank multiplies alone. Try dp=2 (rows of X), or tp=2 (columns, then rows, of W).",
                Layout((over_dp, ())),
                Layout(((), ())),
                Layout((over_dp, ())),
                (),
                weight_sum,
            )
        ]
    rows = " Rows of X are cut over dp besides." if over_dp else ""
    return [
        Cut(
            "tensor parallel, columns of W",
            "Every rank has all of its X and some columns of W, and gets those columns of Y, finished." + rows,
            Layout((over_dp, ())),
            Layout(((), over_tp)),
            Layout((over_dp, over_tp)),
            (),
            (("dX", "tp"), *weight_sum),
        ),
        Cut(
            "tensor parallel, rows of W",
            "Every rank has some columns of X and the rows of W that meet them: a partial sum of every number of Y."
            + rows,
            Layout((over_dp, over_tp)),
            Layout((over_tp, ())),
            Layout((over_dp, ())),
            (("Y", "tp"),),
            weight_sum,
        ),
    ]


def matrix_x(rows: int, inner: int) -> list[list[float]]:
    """Small whole numbers, so that every sum is exact and can be checked by hand."""
    return [[float((3 * i + j) % 5 - 1) for j in range(inner)] for i in range(rows)]


def matrix_w(inner: int, columns: int) -> list[list[float]]:
    """Small whole numbers."""
    return [[float((2 * j + k) % 7 - 3) for k in range(columns)] for j in range(inner)]


def matrix_dy(rows: int, columns: int) -> list[list[float]]:
    """A gradient of Y, as if a loss had given it."""
    return [[float((i + 2 * k) % 3 - 1) for k in range(columns)] for i in range(rows)]


def side_by_side(blocks: dict[str, tuple[tuple[tuple[int, int], ...], list[list[float]]]]) -> list[str]:
    """Lines that show named blocks next to each other: each its name, which rows and columns it is, its numbers."""
    pictures = [_picture(name, ranges, numbers) for name, (ranges, numbers) in blocks.items()]
    height = max(len(picture) for picture in pictures)
    widths = [max(map(len, picture)) for picture in pictures]
    lines = []
    for index in range(height):
        cells = [picture[index] if index < len(picture) else "" for picture in pictures]
        lines.append("   ".join(cell.ljust(width) for cell, width in zip(cells, widths)).rstrip())
    return lines


def _picture(name: str, ranges: tuple[tuple[int, int], ...], numbers: list[list[float]]) -> list[str]:
    (top, bottom), (left, right) = ranges
    if bottom == top or right == left:
        return [f"{name}: nothing", "(more ranks than parts)"]
    width = max(len(f"{number:g}") for row in numbers for number in row)
    head = f"{name}[{top}:{bottom}, {left}:{right}]"
    return [head, *(" ".join(f"{number:g}".rjust(width) for number in row) for row in numbers)]
