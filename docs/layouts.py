"""Draws where each block of X, W and Y lies and moves under every tensor layout, from the code's own products.

`python docs/layouts.py` rewrites docs/layouts/*.svg and the tables of docs/tensor_layouts.md; a test holds them equal.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from html import escape
from pathlib import Path

from parallelrun import product as products
from parallelrun.layout import Layout
from parallelrun.plan.mesh_shape import MeshShape
from parallelrun.product import ActivationLayout, Product, transfers

HERE = Path(__file__).parent
PAGE = HERE / "tensor_layouts.md"
SIDE, GAP, TOP, CELLS = 176, 46, 58, 8  # pixels of a matrix, between matrices, above them; rows and columns of each
HELD, BROUGHT, OTHER, LINE, TEXT = "#2b6cb0", "#bee3f8", "#f7fafc", "#a0aec0", "#1a202c"
OPERANDS = {"x": "X", "w": "W", "y": "Y", "dx": "dX", "dw": "dW", "dy": "dY"}


@dataclass(frozen=True)
class Picture:
    """One layout to draw: the file's name, what it is called, the mesh and the product."""

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
    """The picture as SVG: X, W and Y cut into blocks by rank; what `rank` holds dark, what is brought to it light."""
    product, mesh = picture.product, picture.mesh
    x, y = _layout(product.x), _layout(product.y)
    panels = product.panels
    brought_x = Layout((x.dims[0], ())) if panels else _layout(product.gathered_x)
    brought_w = Layout((product.weight.dims[0], ())) if panels else product.gathered_weight
    partial_y = y if panels else _layout(product.y.without(product.scatter_y))
    matrices = (
        ("X", "rows M, features K", x, brought_x, False),
        ("W", "K rows, N columns", product.weight, brought_w, True),
        ("Y", "rows M, features N", y, partial_y, False),
    )
    width, height = 3 * SIDE + 4 * GAP, TOP + SIDE + 86
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="12" fill="{TEXT}">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{GAP}" y="24" font-size="15" font-weight="bold">{escape(picture.title)}</text>',
    ]
    for index, (name, dims, held, brought, turned) in enumerate(matrices):
        left = GAP + index * (SIDE + GAP)
        parts.append(f'<text x="{left}" y="{TOP - 8}"><tspan font-weight="bold">{name}</tspan>: {dims}</text>')
        parts += _matrix(mesh, held, brought, rank, left, turned)
        sign = ("×", "=", "")[index]
        parts.append(f'<text x="{left + SIDE + GAP / 2 - 5}" y="{TOP + SIDE / 2 + 5}" font-size="18">{sign}</text>')
    coordinate = ", ".join(f"{axis} {mesh.coordinate(rank)[axis]}" for axis in mesh.mesh_dim_names)
    below = TOP + SIDE + 24
    parts += [
        f'<rect x="{GAP}" y="{below - 11}" width="14" height="14" fill="{HELD}"/>',
        f'<text x="{GAP + 20}" y="{below}">held by rank {rank} ({coordinate})</text>',
        f'<rect x="{GAP}" y="{below + 11}" width="14" height="14" fill="{BROUGHT}"/>',
        f'<text x="{GAP + 20}" y="{below + 22}">{_legend(product)}</text>',
        f'<text x="{GAP}" y="{below + 44}" fill="#4a5568">Numbers in the blocks are the ranks that hold them.</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _legend(product: Product) -> str:
    if product.panels:
        return "comes by, panel by panel, and is let go"
    brought = [name for name, moves in (("X", product.gather_x), ("W", product.gather_w)) if moves]
    summed = "Y: partial sums it computes and deals out" if product.scatter_y else ""
    summed = summed or ("Y: partial sums, all-reduced" if product.sum_y else "")
    gathered = f"{' and '.join(brought)}: gathered to it" if brought else ""
    return "; ".join(text for text in (gathered, summed) if text) or "(nothing moves forward)"


def _layout(lies: ActivationLayout) -> Layout:
    return Layout((lies.rows, lies.features))


def _matrix(mesh: MeshShape, held: Layout, brought: Layout, rank: int, left: int, turned: bool) -> list[str]:
    """Rectangles of one matrix of CELLS x CELLS; `turned`: stored (N, K), drawn as K x N."""
    unit = SIDE / CELLS
    parts = []

    def box(layout: Layout, at: int) -> tuple[float, float, float, float]:
        (top, bottom), (start, stop) = layout.ranges((CELLS, CELLS), mesh.sizes, mesh.coordinate(at))
        if turned:
            top, bottom, start, stop = start, stop, top, bottom
        return left + start * unit, TOP + top * unit, (stop - start) * unit, (bottom - top) * unit

    holders: dict[tuple[float, float, float, float], list[int]] = {}
    for at in range(mesh.num_ranks):
        holders.setdefault(box(held, at), []).append(at)
    own, wide = box(held, rank), box(brought, rank)
    parts.append(_rectangle((left, TOP, SIDE, SIDE), OTHER, LINE))
    parts.append(_rectangle(wide, BROUGHT, "none"))
    parts.append(_rectangle(own, HELD, "none"))
    for place, ranks in holders.items():
        parts.append(_rectangle(place, "none", LINE))
        x, y, width, height = place
        colour = "white" if place == own else TEXT
        parts.append(
            f'<text x="{x + width / 2:g}" y="{y + height / 2 + 4:g}" text-anchor="middle" fill="{colour}" '
            f'font-size="{9 if height < 30 or len(ranks) > 2 else 12}">{_ranks(ranks)}</text>'
        )
    return parts


def _ranks(ranks: list[int]) -> str:
    whole = len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1))
    return f"{ranks[0]}–{ranks[-1]}" if whole else ",".join(map(str, ranks))


def _rectangle(box: tuple[float, float, float, float], fill: str, stroke: str) -> str:
    x, y, width, height = box
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" stroke="{stroke}"/>'


def moves_table(picture: Picture) -> str:
    """What one product moves, as a Markdown table; volumes as shares of MK, KN or MN that a rank receives."""
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
    """The page with every table between its markers written anew."""
    for picture in PICTURES:
        marker = f"<!-- moves:{picture.name} -->"
        pattern = re.escape(marker) + r".*?<!-- end -->"
        assert re.search(pattern, text, re.S), f"docs/tensor_layouts.md has no place {marker}"
        text = re.sub(pattern, f"{marker}\n{moves_table(picture)}\n<!-- end -->", text, flags=re.S)
    return text


def files() -> dict[Path, str]:
    """Every generated file and what it should hold."""
    drawn = {HERE / "layouts" / f"{picture.name}.svg": draw(picture) for picture in PICTURES}
    return {**drawn, PAGE: page(PAGE.read_text())}


if __name__ == "__main__":
    for path, content in files().items():
        path.write_text(content)
        print(path)
