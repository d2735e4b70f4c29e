"""The ways to cut a matrix product Y = X W over ranks, as products. Torch-free: what `lesson` computes and prints.

data: each rank has some rows of X and all of W (data parallelism; the data strategies). 1D: all of X and some columns
of W,
then some columns of X and the rows of W that meet them (the two halves of Megatron's tensor parallelism). 2D, 2.5D and
3D: every matrix is cut along both dims (`parallelrun.product`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from parallelrun import product as products
from parallelrun.layout import Layout
from parallelrun.plan.mesh_shape import MeshShape
from parallelrun.product import Activation, Product

GRID_SAYS = {
    "summa": "Every rank keeps one block of X, of W and of Y. The inner dim is cut into panels: panel after panel, a "
    "block of X goes along its row of ranks and a block of W along its column, and each rank adds their product to its "
    "block of Y (SUMMA; Optimus).",
    "stationary_y": "Y stays where it is computed: each rank gathers its rows of X whole and its columns of W whole.",
    "stationary_x": "X stays where it is: each rank gathers the rows of W that meet its columns of X; the partial sums "
    "of Y are summed and dealt out along a row of ranks.",
    "stationary_w": "W stays where it is: each rank gathers rows of X; the partial sums of Y are summed and dealt out. "
    "The two axes change roles, so the next product leads back.",
    "3d": "Every matrix is cut over all three axes. Rows of X are gathered over one axis, columns of W over another, "
    "and the partial sums of Y are summed and dealt out over the third (Agarwal et al. 1995).",
}
DEPTH_SAYS = (
    " Each depth slice does so with its own rows of X; only the gradient of W is summed over depth (Tesseract)."
)


@dataclass(frozen=True)
class Cut:
    """One way to cut: what it is called, what happens, and the product that says who holds and moves what."""

    title: str
    says: str
    product: Product


def cuts(mesh: MeshShape, kind: str = "megatron", form: str = "auto") -> list[Cut]:
    """What a mesh can show: data parallelism when it has dp > 1, both 1D cuts when it has tp > 1, or the grid's form.

    form: of a 2d or 2.5d grid; `auto` shows SUMMA on a square grid and stationary_y on any other.
    """
    over_dp = ("dp",) if mesh.size("dp") > 1 else ()
    if mesh.size("tp") == 1:
        return [_without_tensor_axis(over_dp)]
    besides = " Rows of X are cut over dp besides." if over_dp else ""
    if kind != "megatron":
        cut = _grid(mesh, kind, form)
        return [Cut(cut.title, cut.says + besides, with_rows(cut.product, over_dp))]
    return [
        Cut(
            "tensor parallel, columns of W",
            "Every rank has all of its X and some columns of W, and gets those columns of Y, finished." + besides,
            with_rows(products.column_1d(), over_dp),
        ),
        Cut(
            "tensor parallel, rows of W",
            "Every rank has some columns of X and the rows of W that meet them: a partial sum of every number of Y."
            + besides,
            with_rows(products.row_1d(), over_dp),
        ),
    ]


def with_rows(product: Product, axes: tuple[str, ...]) -> Product:
    """The same product for each part of the rows over `axes` (dp): W is held whole by all of them."""

    def wider(activation: Activation) -> Activation:
        return Activation((*axes, *activation.rows), activation.features)

    return replace(product, x=wider(product.x), y=wider(product.y))


def _without_tensor_axis(over_dp: tuple[str, ...]) -> Cut:
    alone = Product("data", Activation(over_dp), Activation(over_dp), Layout(((), ())))
    if not over_dp:
        says = "One rank multiplies alone. Try dp=2 (rows of X), tp=2 (columns, then rows, of W), layout=2d tp=4."
        return Cut("one device: nothing is cut", says, alone)
    says = "Every rank has all of W and its own rows of X. Forward needs nobody; the gradients of W are summed."
    return Cut("data parallel: rows of X", says, alone)


def _grid(mesh: MeshShape, kind: str, form: str) -> Cut:
    if kind == "3d":
        return Cut("3D tensor parallel", GRID_SAYS["3d"], products.cube(Activation(("x", "y"), ("z",))))
    deep = mesh.size("depth") > 1
    square = mesh.size("row") == mesh.size("col")
    chosen = form if form != "auto" else "summa" if square else "stationary_y"
    product = getattr(products, chosen)(Activation((*(("depth",) if deep else ()), "row"), ("col",)))
    title = f"{'2.5D' if deep else '2D'} tensor parallel, {'SUMMA' if chosen == 'summa' else chosen.replace('_', ' ')}"
    return Cut(title, GRID_SAYS[chosen] + (DEPTH_SAYS if deep else ""), product)


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
