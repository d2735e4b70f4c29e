"""The products that the tensor layouts use: 1D, the three stationary operands, SUMMA, 3D, and embedding lookups.

Sources: 1D Shoeybi et al. 2019; 2D SUMMA (van de Geijn and Watts 1997) as in Optimus (Xu et al. 2021); 2.5D Tesseract
(Wang et al. 2021); 3D Agarwal et al. 1995, Bian et al. 2021; stationary operands as in MeshSlice and AxoNN.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from parallelrun.base.layout import Layout
from parallelrun.planner.model.product import ActivationLayout, Move, Product


@lru_cache(maxsize=256)
def column_1d(axis: str = "tp", sequence_parallel: bool = False) -> Product:
    """Megatron's column-parallel layer: X replicated, W split by outputs; backward sums dX.

    sequence_parallel: X is split by rows, so that it is gathered and dX is scattered instead.
    """
    y, weight = ActivationLayout((), (axis,)), Layout(((axis,), ()))
    if sequence_parallel:
        return Product("column", ActivationLayout((axis,)), y, weight, gather_x=Move("rows", axis))
    return Product("column", ActivationLayout(), y, weight, sum_x=axis)


@lru_cache(maxsize=256)
def row_1d(axis: str = "tp", sequence_parallel: bool = False, lookup: bool = False) -> Product:
    """Megatron's row-parallel layer: X split by features, W split by inputs; forward sums Y.

    sequence_parallel: Y is split by rows, so that it is scattered instead. lookup: X is one-hot (an embedding).
    """
    x, weight = ActivationLayout((), (axis,)), Layout(((), (axis,)))
    if sequence_parallel:
        return Product("row", x, ActivationLayout((axis,)), weight, scatter_y=Move("rows", axis), lookup=lookup)
    return Product("row", x, ActivationLayout(), weight, sum_y=axis, lookup=lookup)


@lru_cache(maxsize=256)
def stationary_y(x: ActivationLayout) -> Product:
    """Y is not sent: X's features and W's rows are gathered. For any grid. Y has the layout of X.

    W is split by outputs over (features, *rows) axes, so that the gathered part is contiguous.
    """
    (across,) = x.features
    rows = tuple(axis for axis in x.rows if axis != "depth")  # 2.5D's depth holds copies of W
    weight = Layout(((across, *rows), ()))
    return Product("stationary_y", x, x, weight, gather_x=Move("features", across), gather_w=tuple(reversed(rows)))


@lru_cache(maxsize=256)
def stationary_x(x: ActivationLayout) -> Product:
    """X is not sent: W's rows are gathered, Y's partial sums scattered. Y has the layout of X."""
    (across,) = x.features
    along = x.rows[-1]
    weight = Layout(((along,), (across,)))
    return Product("stationary_x", x, x, weight, gather_w=(along,), scatter_y=Move("features", across))


@lru_cache(maxsize=256)
def stationary_w(x: ActivationLayout) -> Product:
    """W is not sent: X's samples are gathered, Y's partial sums scattered over samples. The two axes of the grid change
    roles, so layers come in pairs (as the odd layers of AxoNN, Singh et al. 2023)."""
    (across,) = x.features
    *outer, along = x.rows
    y = ActivationLayout((*outer, across), (along,))
    weight = Layout(((along,), (across,)))
    return Product("stationary_w", x, y, weight, gather_x=Move("rows", along), scatter_y=Move("rows", across))


def summa(x: ActivationLayout) -> Product:
    """2D SUMMA: blocks W[N_col, K_row]; panels of K of X and W are broadcast along the grid; only blocks are kept."""
    (across,) = x.features
    return Product("summa", x, x, Layout(((across,), (x.rows[-1],))), panels=True)


@lru_cache(maxsize=256)
def cube(x: ActivationLayout) -> Product:
    """3D: X rows (a, b), features c -> Y rows (a, c), features b; every matrix is split over all three axes."""
    (across,) = x.features
    outer, inner = x.rows
    y = ActivationLayout((outer, across), (inner,))
    return Product(
        "3d", x, y, Layout(((inner, outer), (across,))),
        gather_x=Move("rows", inner), gather_w=(outer,), scatter_y=Move("rows", across),
    )  # fmt: skip


@lru_cache(maxsize=256)
def to_latent(x: ActivationLayout) -> Product:
    """Every rank computes Y completely for its samples, from all of X's features and all of W, which is stored as that
    of `stationary_y`. Each rank's gradient of Y is a part of a sum: those of X and W are summed over all axes."""
    product = stationary_y(x)
    return replace(product, form="latent", y=replace(x, features=()), gather_w=(*product.gather_w, *x.features))


@lru_cache(maxsize=256)
def from_latent(y: ActivationLayout) -> Product:
    """As `stationary_y`, with all features of X on every rank; dX is a part of the sum that `to_latent` computes."""
    return replace(stationary_y(y), form="latent", x=replace(y, features=()), gather_x=None)


@lru_cache(maxsize=256)
def gathered_features(x: ActivationLayout) -> Product:
    """No product: X's features are gathered, so that Y are complete rows of this rank's samples."""
    return Product("rows", x, replace(x, features=()), Layout.replicated(2), gather_x=Move("features", *x.features))


@lru_cache(maxsize=256)
def scattered_features(y: ActivationLayout) -> Product:
    """No product: X are complete rows, a part of a sum on each rank, which is scattered along features."""
    return Product("rows", replace(y, features=()), y, Layout.replicated(2), scatter_y=Move("features", *y.features))


def lookup(y: ActivationLayout, weight: Layout, gather_w: tuple[str, ...], scatter_y: Move) -> Product:
    """Token ids -> Y, from a table W (vocabulary, hidden) split as the head's, so that a tied weight is one tensor."""
    gathered = weight.dims[0][: len(weight.dims[0]) - len(gather_w)]
    x = ActivationLayout(y.without(scatter_y).rows, gathered)
    return Product("lookup", x, y, weight, gather_w=gather_w, scatter_y=scatter_y, lookup=True)
