"""The ways to split a matrix product Y = X W over ranks, as products. `network` computes and prints them.

data: each rank has some rows of X and all of W (data parallelism). 1D: all of X and some columns of W, then some
columns of X and the matching rows of W (the two halves of Megatron's tensor parallelism). 2D, 2.5D and 3D: every matrix
is split along both dims (`parallelrun.planner.model.product`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from parallelrun.base.layout import Layout
from parallelrun.planner.contract.mesh_shape import MeshShape
from parallelrun.planner.model.product import ActivationLayout, Product
from parallelrun.planner.model.product import forms as products

GRID_TEXTS = {
    "summa": "Every rank keeps one block of X, of W and of Y. The inner dim is cut into panels. For each panel, a "
    "block of X is broadcast along its row of ranks and a block of W along its column, and each rank adds their "
    "product to its block of Y (SUMMA; Optimus).",
    "stationary_y": "Y is not sent: each rank gathers the full rows of X and the full columns of W for its block of Y.",
    "stationary_x": "X is not sent: each rank gathers the rows of W that match its columns of X, and the partial sums "
    "of Y are reduce-scattered along a row of ranks.",
    "stationary_w": "W is not sent: each rank gathers rows of X, and the partial sums of Y are reduce-scattered. The "
    "two axes change roles, so the next product changes them back.",
    "3d": "Every matrix is split over all three axes. Rows of X are gathered over one axis, columns of W over another, "
    "and the partial sums of Y are reduce-scattered over the third (Agarwal et al. 1995).",
}
DEPTH_TEXT = (
    " Each depth slice does so with its own rows of X; only the gradient of W is summed over depth (Tesseract)."
)


@dataclass(frozen=True)
class ProductCut:
    """One way to split: its title, an explanation, and the product that defines what each rank holds and moves."""

    title: str
    text: str
    product: Product


def cuts(mesh: MeshShape, form: str = "auto") -> list[ProductCut]:
    """Return what a mesh can show: data parallelism with dp > 1, both 1D cuts with tp > 1, or the product on a grid.

    form: of a 2d or 2.5d grid; `auto` shows SUMMA on a square grid and stationary_y on any other.
    """
    over_dp = ("dp",) if mesh.size("dp") > 1 else ()
    if mesh.size("tp") == 1:
        return [_without_tensor_axis(over_dp)]
    if mesh.mesh_dims_of("tp") != ("tp",):
        layouts = [_grid(mesh, form)]
    else:
        columns = "Every rank has all of X and some columns of W, and computes those columns of Y completely."
        rows = "Every rank has some columns of X and the matching rows of W: a partial sum of every element of Y."
        layouts = [
            ProductCut("tensor parallel, columns of W", columns, products.column_1d()),
            ProductCut("tensor parallel, rows of W", rows, products.row_1d()),
        ]
    also = " Rows of X are also split over dp." if over_dp else ""
    return [ProductCut(cut.title, cut.text + also, with_rows(cut.product, over_dp)) for cut in layouts]


def with_rows(product: Product, axes: tuple[str, ...]) -> Product:
    """The same product with the rows also split over `axes` (dp), each of whose ranks holds all of W."""

    def wider(activation: ActivationLayout) -> ActivationLayout:
        return ActivationLayout((*axes, *activation.rows), activation.features)

    return replace(product, x=wider(product.x), y=wider(product.y))


def _without_tensor_axis(over_dp: tuple[str, ...]) -> ProductCut:
    product = Product("data", ActivationLayout(over_dp), ActivationLayout(over_dp), Layout(((), ())))
    if not over_dp:
        text = "One rank multiplies alone. Try dp=2 (rows of X), tp=2 (columns, then rows, of W), layout=2d tp=4."
        return ProductCut("one device: nothing is split", text, product)
    text = "Every rank has all of W and its own rows of X. Forward needs no other rank; the gradients of W are summed."
    return ProductCut("data parallel: rows of X", text, product)


def _grid(mesh: MeshShape, form: str) -> ProductCut:
    if "z" in mesh.mesh_dim_names:
        return ProductCut("3D tensor parallel", GRID_TEXTS["3d"], products.cube(ActivationLayout(("x", "y"), ("z",))))
    depth = ("depth",) if mesh.size("depth") > 1 else ()
    square = mesh.size("row") == mesh.size("col")
    shown = form if form != "auto" else "summa" if square else "stationary_y"
    product = getattr(products, shown)(ActivationLayout((*depth, "row"), ("col",)))
    title = f"{'2.5D' if depth else '2D'} tensor parallel, {'SUMMA' if shown == 'summa' else shown.replace('_', ' ')}"
    return ProductCut(title, GRID_TEXTS[shown] + (DEPTH_TEXT if depth else ""), product)
