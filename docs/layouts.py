"""Draws which rank holds which block of X, W and Y, and what is sent, under every tensor layout.

`python docs/layouts.py` rewrites docs/layouts/*.svg and the tables of docs/tensor_parallel.md; a test holds them equal.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from parallelrun.base.layout import Layout
from parallelrun.planner.contract.mesh_shape import MeshShape
from parallelrun.planner.model.product import ActivationLayout, Product, transfers
from parallelrun.planner.model.product import forms as products
from parallelrun.report import chart

HERE = Path(__file__).parent
PAGE = HERE / "tensor_parallel.md"
CELLS = 8  # rows and columns of each matrix
HELD, RECEIVED, OTHER, LINE, TEXT = "#2b6cb0", "#bee3f8", "#f7fafc", "#a0aec0", "#1a202c"
OPERANDS = {"x": "X", "w": "W", "y": "Y", "dx": "dX", "dw": "dW", "dy": "dY"}


@dataclass(frozen=True)
class Picture:
    """One layout to draw: the file's name, the title, the mesh and the product."""

    name: str
    title: str
    mesh_dims: tuple[tuple[str, int], ...]
    product: Product

    @property
    def mesh(self) -> MeshShape:
        return MeshShape(self.mesh_dims)


GRID, DEEP, CUBE = (
    ActivationLayout(("row",), ("col",)),
    ActivationLayout(("depth", "row"), ("col",)),
    ActivationLayout(("x", "y"), ("z",)),
)
TP, SQUARE = (("tp", 4),), (("row", 2), ("col", 2))
PICTURES = (
    Picture("1d_column", "1D, column layer, 4 ranks", TP, products.column_1d()),
    Picture("1d_row", "1D, row layer, 4 ranks", TP, products.row_1d()),
    Picture("2d_summa", "2D, SUMMA, 2 x 2 ranks", SQUARE, products.summa(GRID)),
    Picture("2d_stationary_y", "2D, stationary Y, 2 x 2 ranks", SQUARE, products.stationary_y(GRID)),
    Picture("2d_stationary_x", "2D, stationary X, 2 x 2 ranks", SQUARE, products.stationary_x(GRID)),
    Picture("2d_stationary_w", "2D, stationary W, 2 x 2 ranks", SQUARE, products.stationary_w(GRID)),
    Picture("25d", "2.5D, SUMMA in each of 2 slices of 2 x 2 ranks", (("depth", 2), *SQUARE), products.summa(DEEP)),
    Picture("3d", "3D, 2 x 2 x 2 ranks", (("x", 2), ("y", 2), ("z", 2)), products.cube(CUBE)),
)


def draw(picture: Picture, rank: int = 0) -> str:
    """Return, as SVG, X, W and Y cut into blocks by rank: those of `rank` dark, those sent to it light."""
    product, mesh = picture.product, picture.mesh
    x, y = _layout(product.x), _layout(product.y)
    panels = product.panels
    received_x = Layout((x.dims[0], ())) if panels else _layout(product.gathered_x)
    received_w = Layout((product.weight.dims[0], ())) if panels else product.gathered_weight
    partial_y = y if panels else _layout(product.y.without(product.scatter_y))
    matrices = (
        ("X: rows M, features K", x, received_x, False),
        ("W: K rows, N columns", product.weight, received_w, True),
        ("Y: rows M, features N", y, partial_y, False),
    )
    drawn = chart.figure(7.0, 3.4, picture.title)
    for index, (name, held, received, transposed) in enumerate(matrices):
        axes = drawn.add_subplot(1, 3, 1 + index)
        axes.set_axis_off()
        axes.set(xlim=(-0.05, CELLS + 0.05), ylim=(CELLS + 0.05, -0.05), aspect="equal")
        axes.set_title(name, fontsize=9, loc="left")
        axes.text(CELLS * 1.11, CELLS / 2, ("×", "=", "")[index], fontsize=14, ha="center", va="center")
        _matrix(axes, mesh, held, received, rank, transposed)
    coordinate = ", ".join(f"{axis} {mesh.coordinate(rank)[axis]}" for axis in mesh.mesh_dim_names)
    handles = [
        Patch(color=HELD, label=f"held by rank {rank} ({coordinate})"),
        Patch(color=RECEIVED, label=_legend(product)),
    ]
    drawn.legend(
        handles=handles, loc="outside lower left", frameon=False, fontsize=9, alignment="left",
        title="The numbers in the blocks are the ranks that hold them.", title_fontsize=9,
    )  # fmt: skip
    return chart.svg(drawn)


def _legend(product: Product) -> str:
    if product.panels:
        return "received panel by panel, and freed after use"
    gathered = [name for name, moves in (("X", product.gather_x), ("W", product.gather_w)) if moves]
    summed = "Y: partial sums that it computes and scatters" if product.scatter_y else ""
    summed = summed or ("Y: partial sums, all-reduced" if product.sum_y else "")
    received = f"{' and '.join(gathered)}: gathered by it" if gathered else ""
    return "; ".join(text for text in (received, summed) if text) or "(forward sends nothing)"


def _layout(activation: ActivationLayout) -> Layout:
    return Layout((activation.rows, activation.features))


def _matrix(axes: Axes, mesh: MeshShape, held: Layout, received: Layout, rank: int, transposed: bool) -> None:
    """Draw one matrix of CELLS x CELLS; transposed: it is stored as (N, K) and drawn as K x N."""

    def box(layout: Layout, at: int) -> tuple[float, float, float, float]:
        (top, bottom), (start, stop) = layout.ranges((CELLS, CELLS), mesh.sizes, mesh.coordinate(at))
        if transposed:
            top, bottom, start, stop = start, stop, top, bottom
        return start, top, stop - start, bottom - top

    def rectangle(of: tuple[float, float, float, float], fill: str, edge: str) -> None:
        axes.add_patch(Rectangle(of[:2], *of[2:], facecolor=fill, edgecolor=edge))

    holders: dict[tuple[float, float, float, float], list[int]] = {}
    for at in range(mesh.num_ranks):
        holders.setdefault(box(held, at), []).append(at)
    own = box(held, rank)
    rectangle((0, 0, CELLS, CELLS), OTHER, LINE)
    rectangle(box(received, rank), RECEIVED, "none")
    rectangle(own, HELD, "none")
    for block, ranks in holders.items():
        rectangle(block, "none", LINE)
        x, y, width, height = block
        small = height < 2 or width < 2 or len(ranks) > 2
        colour, size = "white" if block == own else TEXT, 7 if small else 9
        axes.text(x + width / 2, y + height / 2, _ranks(ranks), ha="center", va="center", color=colour, fontsize=size)


def _ranks(ranks: list[int]) -> str:
    consecutive = len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1))
    return f"{ranks[0]}–{ranks[-1]}" if consecutive else ",".join(map(str, ranks))


def moves_table(picture: Picture) -> str:
    """Return what one product sends, as a Markdown table; a rank receives shares of MK, KN or MN."""
    product, sizes = picture.product, picture.mesh.sizes
    size = {"x": "MK", "dx": "MK", "w": "KN", "dw": "KN", "y": "MN", "dy": "MN"}
    cells = CELLS * CELLS
    lines = ["| phase | moves | over | a rank receives |", "|---|---|---|---|"]
    for move in transfers(product, CELLS, CELLS, CELLS, sizes):
        times = f"{move.calls} x " if move.calls > 1 else ""
        share = f"{move.received(sizes) / cells:g} {size[move.operand]}"
        text = f"{times}{move.operation.replace('_', '-')} of {OPERANDS[move.operand]}"
        lines.append(f"| {move.phase} | {text} | {move.axis} | {share} |")
    for axis in product.partial_weight:
        lines.append(f"| once a step | all-reduce of dW | {axis} | with the other gradients |")
    return "\n".join(lines)


def page(text: str) -> str:
    """Return the page with the current table between every pair of markers."""
    for picture in PICTURES:
        marker = f"<!-- moves:{picture.name} -->"
        pattern = re.escape(marker) + r".*?<!-- end -->"
        assert re.search(pattern, text, re.S), f"docs/tensor_parallel.md has no marker {marker}"
        text = re.sub(pattern, f"{marker}\n{moves_table(picture)}\n<!-- end -->", text, flags=re.S)
    return text


def files() -> dict[Path, str]:
    """Return every generated file with its contents."""
    drawn = {HERE / "layouts" / f"{picture.name}.svg": draw(picture) for picture in PICTURES}
    return {**drawn, PAGE: page(PAGE.read_text())}


if __name__ == "__main__":
    for path, content in files().items():
        path.write_text(content)
        print(path)
