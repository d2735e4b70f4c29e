"""How one distributed product Y = X W^T is computed over named axes: what each rank holds, and what is sent.

The one source for the runtime of the grid tensor strategies, for predicted traffic, for the comparison
that `plan` prints, for the `matmul` lesson and for the pictures in docs/tensor_parallel.md. M are the rows of X (tokens
of a microbatch; only complete samples are split), K its features, N the features of Y. W is stored as (out, in), which
is (N, K).

The products of each layout are in `forms`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import ceil, lcm, log2, prod

from parallelrun.base.layout import Layout

Sizes = Mapping[str, int]


@dataclass(frozen=True)
class Move:
    """A collective over `axis` along one dim (`rows` | `features`) of an activation."""

    dim: str
    axis: str


@dataclass(frozen=True)
class ActivationLayout:
    """The axes that split an activation's samples (dim 0) and its last dim, major first."""

    rows: tuple[str, ...] = ()
    features: tuple[str, ...] = ()

    def without(self, move: Move | None) -> ActivationLayout:
        """The layout after an all-gather along `move`, which removes the minor-most axis of that dim."""
        if move is None:
            return self
        axes_of_dim = getattr(self, move.dim)
        assert axes_of_dim and axes_of_dim[-1] == move.axis, (
            f"{move.axis} is not the minor-most axis of {move.dim} {axes_of_dim}"
        )
        return replace(self, **{move.dim: axes_of_dim[:-1]})

    def local(self, rows: int, features: int, sizes: Sizes) -> tuple[int, int]:
        """(rows, features) of the largest part."""
        for axis in self.rows:
            rows = -(-rows // sizes.get(axis, 1))
        for axis in self.features:
            features = -(-features // sizes.get(axis, 1))
        return rows, features


@dataclass(frozen=True)
class Product:
    """One way to compute Y = X W^T.

    Forward: X is all-gathered along `gather_x`, W along its dim 0 over each axis of `gather_w` (minor-most first), the
    local parts are multiplied, and the partial sums are reduce-scattered along `scatter_y` (or all-reduced over
    `sum_y`). Backward mirrors it: dY is gathered where Y was scattered, dX is scattered where X was gathered (or
    all-reduced over `sum_x`), dW is reduce-scattered over `gather_w`. `panels`: panels of K are broadcast and reduced
    instead (SUMMA). `lookup`: an embedding, the product with one-hot rows; W is stored as (in, out), and X is not sent.
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

    @cached_property
    def gathered_x(self) -> ActivationLayout:
        """The layout of X when it is multiplied."""
        return self.x.without(self.gather_x)

    @cached_property
    def gathered_weight(self) -> Layout:
        """The layout of W when it is multiplied."""
        first = self.weight.dims[0]
        count = len(first) - len(self.gather_w)
        assert first[count:] == self.gather_w[::-1], f"{self.gather_w} are not the minor-most axes of {self.weight}"
        return Layout((first[:count], *self.weight.dims[1:]))

    @property
    def partial_weight(self) -> tuple[str, ...]:
        """Axes over which the gradient of W is still a partial sum after its own reduce-scatter (2.5D: depth)."""
        if self.panels:
            return self.x.rows[:-1]
        return tuple(axis for axis in self.gathered_x.rows if axis not in self.gather_w)

    @property
    def weight_layout(self) -> Layout:
        """The Layout of the parameter W."""
        return Layout(self.weight.dims, self.partial_weight)

    @property
    def bias_layout(self) -> Layout:
        """The Layout of a bias (out): split as Y's features; each rank has the gradient of its own rows."""
        return Layout((self.y.features,), self.y.rows)


@dataclass(frozen=True)
class Transfer:
    """`calls` collectives over `axis`, each with a full-size buffer of `elements`. phase: forward | backward; operand:
    x | w | y | dx | dw | dy. again: backward repeats a gather whose result forward did not keep."""

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
        """Consecutive messages in all calls: rings, and trees for broadcasts and reductions."""
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
    within_rank: bool = False,
) -> list[Transfer]:
    """Every collective of one product, forward and backward, padding of uneven rows of W included.

    m, k, n: global rows and features (k = vocabulary and n = hidden for a lookup). save_gathered: backward uses the
    tensors that forward gathered instead of gathering them again. input_gradient: False if X is the model's own input.
    within_rank: also over axes of one rank, where panels are copied.
    """
    flags = save_gathered, input_gradient, weight_gradient, within_rank
    return list(_transfers(product, (m, k, n), tuple(sizes.items()), flags))


@lru_cache(maxsize=256)
def _transfers(
    product: Product, shape: tuple[int, int, int], degrees: tuple[tuple[str, int], ...], flags: tuple[bool, ...]
) -> tuple[Transfer, ...]:
    sizes = dict(degrees)
    *needed, within_rank = flags
    moves = (
        _panels(product, *shape, sizes, *needed[1:]) if product.panels else _gathers(product, *shape, sizes, *needed)
    )
    return tuple(transfer for transfer in moves if within_rank or sizes.get(transfer.axis, 1) > 1)


def _gathers(
    product: Product, m: int, k: int, n: int, sizes: Sizes, saved: bool, input_gradient: bool, weight_gradient: bool
) -> list[Transfer]:
    gathered_x = prod(product.gathered_x.local(m, k, sizes))
    partial_y = prod(product.y.without(product.scatter_y).local(m, n, sizes))
    into_x, out_of_y = product.gather_x, product.scatter_y
    weights = _weight_gathers(product, (k, n) if product.lookup else (n, k), sizes)
    forward, backward = [], []
    if into_x and not product.lookup:
        forward.append(Transfer("forward", "x", "all_gather", into_x.axis, gathered_x))
    forward += [Transfer("forward", "w", "all_gather", axis, elements) for axis, elements in weights]
    if out_of_y:
        forward.append(Transfer("forward", "y", "reduce_scatter", out_of_y.axis, partial_y))
        backward.append(Transfer("backward", "dy", "all_gather", out_of_y.axis, partial_y))
    if product.sum_y:
        forward.append(Transfer("forward", "y", "all_reduce", product.sum_y, partial_y))
    if not saved and not product.lookup:
        needed = {"x": weight_gradient, "w": input_gradient}
        backward += [
            replace(transfer, phase="backward", again=True) for transfer in forward if needed.get(transfer.operand)
        ]
    if input_gradient and not product.lookup:
        if into_x:
            backward.append(Transfer("backward", "dx", "reduce_scatter", into_x.axis, gathered_x))
        if product.sum_x:
            backward.append(Transfer("backward", "dx", "all_reduce", product.sum_x, gathered_x))
    if weight_gradient:
        backward += [Transfer("backward", "dw", "reduce_scatter", axis, e) for axis, e in reversed(weights)]
    return forward + backward


def _weight_gathers(product: Product, shape: tuple[int, int], sizes: Sizes) -> list[tuple[str, int]]:
    """(axis, elements of the gathered buffer) of each all-gather of W, minor-most axis first; rows padded to equal."""
    rows, width = product.weight.local_shape(shape, sizes, {})
    gathers = []
    for axis in product.gather_w:
        rows *= sizes.get(axis, 1)
        gathers.append((axis, rows * width))
    return gathers


def degree(axes: Iterable[str], sizes: Sizes) -> int:
    """The number of parts into which those axes split a dim."""
    return prod(sizes.get(axis, 1) for axis in axes)


def num_panels(product: Product, sizes: Sizes) -> int:
    """The number of panels into which SUMMA cuts K: one column of X's grid and one row of W's hold each completely."""
    return lcm(degree(product.x.features, sizes), degree(product.weight.dims[1], sizes))


def _panels(
    product: Product, m: int, k: int, n: int, sizes: Sizes, input_gradient: bool, weight_gradient: bool
) -> list[Transfer]:
    """SUMMA's three products: forward A B, dX = dY W, dW = dY^T X. Only the local blocks are ever kept."""
    count = num_panels(product, sizes)
    (across,), (along,) = product.x.features, product.weight.dims[1]  # panels of X are broadcast over `across`
    x_panel = product.x.local(m, k, sizes)[0] * (k // count)
    w_panel = product.weight.local_shape((n, k), sizes, {})[0] * (k // count)
    panels = [
        Transfer("forward", "x", "broadcast", across, x_panel, count),
        Transfer("forward", "w", "broadcast", along, w_panel, count),
    ]
    if input_gradient:
        panels += [
            Transfer("backward", "w", "broadcast", along, w_panel, count, again=True),
            Transfer("backward", "dx", "reduce", across, x_panel, count),
        ]
    if weight_gradient:
        panels += [
            Transfer("backward", "x", "broadcast", across, x_panel, count, again=True),
            Transfer("backward", "dw", "reduce", along, w_panel, count),
        ]
    return panels
