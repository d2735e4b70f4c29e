"""How one distributed product Y = X W^T is computed over named axes: what every rank holds, what moves, what is left.

Torch-free data, the one source for the grid tensor strategies' runtime, for predicted traffic, for the comparison that
`plan`
prints, for the `matmul` lesson and for the pictures in docs/tensor_layouts.md. M are the rows of X (positions of a
microbatch; only whole samples are ever split), K its features, N the features of Y. W is stored (out, in) = (N, K).

Sources: 1D Shoeybi et al. 2019; 2D SUMMA (van de Geijn and Watts 1997) as in Optimus (Xu et al. 2021); 2.5D Tesseract
(Wang et al. 2021); 3D Agarwal et al. 1995, Bian et al. 2021; stationary operands as in MeshSlice and AxoNN.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, lcm, log2, prod

from parallelrun.layout import Layout

Sizes = Mapping[str, int]


@dataclass(frozen=True)
class ActivationLayout:
    """How an activation lies: the axes that split its samples (dim 0) and its last dim, major first."""

    rows: tuple[str, ...] = ()
    features: tuple[str, ...] = ()

    def without(self, move: Move | None) -> ActivationLayout:
        """After an all-gather along `move`: the minor-most axis of that dim is gone."""
        if move is None:
            return self
        held = getattr(self, move.dim)
        assert held and held[-1] == move.axis, f"{move.axis} is not the minor-most axis of {move.dim} {held}"
        return self._with(move.dim, held[:-1])

    def split(self, move: Move | None) -> ActivationLayout:
        """After a reduce-scatter along `move`: it becomes the minor-most axis of that dim."""
        return self if move is None else self._with(move.dim, (*getattr(self, move.dim), move.axis))

    def _with(self, dim: str, axes: tuple[str, ...]) -> ActivationLayout:
        return ActivationLayout(axes, self.features) if dim == "rows" else ActivationLayout(self.rows, axes)

    def local(self, rows: int, features: int, sizes: Sizes) -> tuple[int, int]:
        """(rows, features) of the largest part."""
        return _split(rows, self.rows, sizes), _split(features, self.features, sizes)


@dataclass(frozen=True)
class Move:
    """Along which dim (`rows` | `features`) of an activation, over which axis."""

    dim: str
    axis: str


@dataclass(frozen=True)
class Product:
    """One way to compute Y = X W^T.

    Forward: X is all-gathered along `gather_x`, W along its dim 0 over each axis of `gather_w` (minor-most first), the
    local parts are multiplied, and the partial sums are reduce-scattered along `scatter_y` (or all-reduced over
    `sum_y`). Backward mirrors it: dY is gathered where Y was scattered, dX is scattered where X was gathered (or
    all-reduced over `sum_x`), dW is reduce-scattered over `gather_w`. `panels`: by broadcasts and reductions of panels
    of K instead (SUMMA). A lookup (embedding) is the product with one-hot rows: W is stored (in, out), X is free.
    """

    form: str
    x: ActivationLayout
    y: ActivationLayout
    weight: Layout
    gather_x: Move | None = None
    gather_w: tuple[str, ...] = ()
    scatter_y: Move | None = None
    sum_x: str | None = None
    sum_y: str | None = None
    panels: bool = False
    lookup: bool = False

    @property
    def gathered_x(self) -> ActivationLayout:
        """How X lies when it is multiplied."""
        return self.x.without(self.gather_x)

    @property
    def gathered_weight(self) -> Layout:
        """How W lies when it is multiplied."""
        first = self.weight.dims[0]
        for axis in self.gather_w:
            assert first[-1] == axis, f"{axis} is not the minor-most axis of dim 0 of {self.weight}"
            first = first[:-1]
        return Layout((first, *self.weight.dims[1:]))

    @property
    def partial_weight(self) -> tuple[str, ...]:
        """Axes over which the gradient of W is still a partial sum after its own reduce-scatter: 2.5D's depth."""
        if self.panels:
            return self.x.rows[:-1]
        return tuple(axis for axis in self.gathered_x.rows if axis not in self.gather_w)

    @property
    def weight_layout(self) -> Layout:
        """The parameter's Layout."""
        return Layout(self.weight.dims, self.partial_weight)

    @property
    def bias_layout(self) -> Layout:
        """Of a bias (out): split as Y's features; each rank has the gradient of its own rows."""
        return Layout((self.y.features,), self.y.rows)


@dataclass(frozen=True)
class Transfer:
    """`calls` collectives over `axis`, each with a full-size buffer of `elements`. phase: forward | backward; operand:
    x | w | y | dx | dw | dy. again: backward gathers once more what forward did not keep."""

    phase: str
    operand: str
    operation: str
    axis: str
    elements: int
    calls: int = 1
    again: bool = False

    def received(self, sizes: Sizes) -> float:
        """Elements that a rank receives in all calls, under a bandwidth-optimal algorithm."""
        n = sizes.get(self.axis, 1)
        return self.calls * self.elements * (n - 1) / n * (2 if self.operation == "all_reduce" else 1)

    def steps(self, sizes: Sizes) -> int:
        """Messages one after the other in all calls: rings, and trees for broadcasts and reductions."""
        n = sizes.get(self.axis, 1)
        each = {"all_reduce": 2 * (n - 1), "broadcast": ceil(log2(n)), "reduce": ceil(log2(n))}
        return self.calls * each.get(self.operation, n - 1)


def transfers(
    product: Product,
    m: int,
    k: int,
    n: int,
    sizes: Sizes,
    *,
    save_gathered: bool = True,
    input_gradient: bool = True,
    weight_gradient: bool = True,
) -> list[Transfer]:
    """Everything that one product moves, forward and backward, padding of uneven rows of W included.

    m, k, n: global rows and features (k = vocabulary and n = hidden for a lookup). save_gathered: keep what forward
    gathered instead of gathering it again. input_gradient: False where X is the model's own input.
    """
    if product.panels:
        found = _panels(product, m, k, n, sizes, input_gradient, weight_gradient)
    else:
        found = _gathers(product, m, k, n, sizes, save_gathered, input_gradient, weight_gradient)
    return [transfer for transfer in found if sizes.get(transfer.axis, 1) > 1]


def _gathers(
    product: Product, m: int, k: int, n: int, sizes: Sizes, saved: bool, input_gradient: bool, weight_gradient: bool
) -> list[Transfer]:
    whole_x = prod(product.gathered_x.local(m, k, sizes))
    partial_y = prod(product.y.without(product.scatter_y).local(m, n, sizes))
    into_x, out_of_y = product.gather_x, product.scatter_y
    weights = _weight_gathers(product, (k, n) if product.lookup else (n, k), sizes)
    forward, backward = [], []
    if into_x and not product.lookup:
        forward.append(Transfer("forward", "x", "all_gather", into_x.axis, whole_x))
    forward += [Transfer("forward", "w", "all_gather", axis, elements) for axis, elements in weights]
    if out_of_y:
        forward.append(Transfer("forward", "y", "reduce_scatter", out_of_y.axis, partial_y))
        backward.append(Transfer("backward", "dy", "all_gather", out_of_y.axis, partial_y))
    if product.sum_y:
        forward.append(Transfer("forward", "y", "all_reduce", product.sum_y, partial_y))
    if not saved and not product.lookup:
        again = [
            move
            for move in forward
            if (move.operand == "x" and weight_gradient) or (move.operand == "w" and input_gradient)
        ]
        backward += [Transfer("backward", g.operand, g.operation, g.axis, g.elements, again=True) for g in again]
    if input_gradient and not product.lookup:
        if into_x:
            backward.append(Transfer("backward", "dx", "reduce_scatter", into_x.axis, whole_x))
        if product.sum_x:
            backward.append(Transfer("backward", "dx", "all_reduce", product.sum_x, whole_x))
    if weight_gradient:
        backward += [Transfer("backward", "dw", "reduce_scatter", axis, e) for axis, e in reversed(weights)]
    return forward + backward


def _weight_gathers(product: Product, shape: tuple[int, int], sizes: Sizes) -> list[tuple[str, int]]:
    """(axis, elements of the gathered buffer) of each all-gather of W, minor-most axis first; rows padded to equal."""
    rows, width = _split(shape[0], product.weight.dims[0], sizes), _split(shape[1], product.weight.dims[1], sizes)
    found = []
    for axis in product.gather_w:
        rows *= sizes.get(axis, 1)
        found.append((axis, rows * width))
    return found


def num_panels(product: Product, sizes: Sizes) -> int:
    """Into how many panels SUMMA cuts K: each lies whole on one column of X's grid and on one row of W's."""
    return lcm(prod(sizes.get(a, 1) for a in product.x.features), prod(sizes.get(a, 1) for a in product.weight.dims[1]))


def _panels(
    product: Product, m: int, k: int, n: int, sizes: Sizes, input_gradient: bool, weight_gradient: bool
) -> list[Transfer]:
    """SUMMA's three products: forward A B, dX = dY W, dW = dY^T X. Only the local blocks are ever kept."""
    count = num_panels(product, sizes)
    (across,), (along,) = (
        product.x.features,
        product.weight.dims[1],
    )  # X's panels go along a row of ranks: over `across`
    x_panel = product.x.local(m, k, sizes)[0] * (k // count)
    w_panel = _split(n, product.weight.dims[0], sizes) * (k // count)
    found = [
        Transfer("forward", "x", "broadcast", across, x_panel, count),
        Transfer("forward", "w", "broadcast", along, w_panel, count),
    ]
    if input_gradient:
        found += [
            Transfer("backward", "w", "broadcast", along, w_panel, count, again=True),
            Transfer("backward", "dx", "reduce", across, x_panel, count),
        ]
    if weight_gradient:
        found += [
            Transfer("backward", "x", "broadcast", across, x_panel, count, again=True),
            Transfer("backward", "dw", "reduce", along, w_panel, count),
        ]
    return found


def _split(length: int, axes: tuple[str, ...], sizes: Sizes) -> int:
    """Length of the largest part, as `Layout.ranges` cuts: rounded up axis by axis."""
    for axis in axes:
        length = -(-length // sizes.get(axis, 1))
    return length


def column_1d(axis: str = "tp", sequence_parallel: bool = False) -> Product:
    """Megatron's column layer: X is replicated, W is split by its outputs; backward sums dX over the ranks.

    sequence_parallel: X comes split by rows, so that it is gathered and dX is scattered instead.
    """
    y, weight = ActivationLayout((), (axis,)), Layout(((axis,), ()))
    if sequence_parallel:
        return Product("column", ActivationLayout((axis,)), y, weight, gather_x=Move("rows", axis))
    return Product("column", ActivationLayout(), y, weight, sum_x=axis)


def row_1d(axis: str = "tp", sequence_parallel: bool = False, lookup: bool = False) -> Product:
    """Megatron's row layer: X comes split by features, W is split by its inputs; forward sums Y over the ranks.

    sequence_parallel: Y is split by rows, so that it is scattered instead. lookup: X is one-hot (an embedding).
    """
    x, weight = ActivationLayout((), (axis,)), Layout(((), (axis,)))
    if sequence_parallel:
        return Product("row", x, ActivationLayout((axis,)), weight, scatter_y=Move("rows", axis), lookup=lookup)
    return Product("row", x, ActivationLayout(), weight, sum_y=axis, lookup=lookup)


def stationary_y(x: ActivationLayout) -> Product:
    """Y is computed where it stays: X's features and W's rows are gathered. Any grid. The layout of X is kept.

    W is split by outputs over (features, *rows) axes, so that what is gathered is contiguous.
    """
    (across,) = x.features
    rows = _gathering_rows(x)
    weight = Layout(((across, *rows), ()))
    return Product("stationary_y", x, x, weight, gather_x=Move("features", across), gather_w=tuple(reversed(rows)))


def stationary_x(x: ActivationLayout) -> Product:
    """X is multiplied where it lies: W's rows are gathered, Y's partial sums scattered. The layout of X is kept."""
    (across,) = x.features
    along = x.rows[-1]
    weight = Layout(((along,), (across,)))
    return Product("stationary_x", x, x, weight, gather_w=(along,), scatter_y=Move("features", across))


def stationary_w(x: ActivationLayout) -> Product:
    """No weight moves: X's samples are gathered, Y's partial sums scattered over samples. The two axes of the grid
    change roles, so layers come in pairs (as the odd layers of AxoNN, Singh et al. 2023)."""
    (across,) = x.features
    *outer, along = x.rows
    y = ActivationLayout((*outer, across), (along,))
    weight = Layout(((along,), (across,)))
    return Product("stationary_w", x, y, weight, gather_x=Move("rows", along), scatter_y=Move("rows", across))


def summa(x: ActivationLayout) -> Product:
    """2D SUMMA: blocks W[N_col, K_row]; panels of K of X and W are broadcast along the grid; only blocks are kept."""
    (across,) = x.features
    return Product("summa", x, x, Layout(((across,), (x.rows[-1],))), panels=True)


def cube(x: ActivationLayout) -> Product:
    """3D: X rows (a, b), features c -> Y rows (a, c), features b; every matrix is split over all three axes."""
    (across,) = x.features
    outer, inner = x.rows
    y = ActivationLayout((outer, across), (inner,))
    return Product(
        "3d", x, y, Layout(((inner, outer), (across,))),
        gather_x=Move("rows", inner), gather_w=(outer,), scatter_y=Move("rows", across),
    )  # fmt: skip


def lookup(y: ActivationLayout, weight: Layout, gather_w: tuple[str, ...], scatter_y: Move) -> Product:
    """Token ids -> Y, from a table W (vocabulary, hidden) split as the head's, so that a tied weight is one tensor."""
    gathered = weight.dims[0][: len(weight.dims[0]) - len(gather_w)]
    rows = y.without(scatter_y).rows
    x = ActivationLayout(rows, gathered)
    return Product("lookup", x, y, weight, gather_w=gather_w, scatter_y=scatter_y, lookup=True)


def _gathering_rows(x: ActivationLayout) -> tuple[str, ...]:
    """The row axes over which W is stored in parts: all of them, but 2.5D's depth, which holds copies."""
    return tuple(axis for axis in x.rows if axis != "depth")
