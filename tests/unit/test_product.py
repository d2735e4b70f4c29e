"""Every form of product gives X W^T and its gradients: played through on one process with numpy blocks per coordinate.

The moves are taken from the Product alone, so a wrong entry of the table (a wrong axis, a forgotten sum) fails here.
"""

from __future__ import annotations

from itertools import product as coordinates
from math import prod

import numpy as np
import pytest

from parallelrun.base.layout import Layout
from parallelrun.planner.model.product import ActivationLayout, Move, Product, transfers
from parallelrun.planner.model.product import forms as products

Place = dict[str, int]
Blocks = dict[tuple[int, ...], np.ndarray]

GRID, DEEP, CUBE = (
    ActivationLayout(("row",), ("col",)),
    ActivationLayout(("depth", "row"), ("col",)),
    ActivationLayout(("x", "y"), ("z",)),
)
SQUARE, OBLONG, TWO_DEEP, EIGHT = (
    {"row": 2, "col": 2},
    {"row": 2, "col": 3},
    {"depth": 2, "row": 2, "col": 2},
    {"x": 2, "y": 2, "z": 2},
)
CASES = {
    "1d column": (products.column_1d(), {"tp": 3}),
    "1d row": (products.row_1d(), {"tp": 3}),
    "2d stationary y": (products.stationary_y(GRID), SQUARE),
    "2x3 stationary y": (products.stationary_y(GRID), OBLONG),
    "2x3 stationary x": (products.stationary_x(GRID), OBLONG),
    "2x3 stationary w": (products.stationary_w(GRID), OBLONG),
    "2x3 stationary w, the way back": (products.stationary_w(products.stationary_w(GRID).y), OBLONG),
    "2.5d stationary y": (products.stationary_y(DEEP), TWO_DEEP),
    "2.5d stationary x": (products.stationary_x(DEEP), TWO_DEEP),
    "2.5d stationary w": (products.stationary_w(DEEP), TWO_DEEP),
    "3d": (products.cube(CUBE), EIGHT),
    "3d, the way back": (products.cube(products.cube(CUBE).y), EIGHT),
    "3d closed": (products.stationary_y(CUBE), EIGHT),
}
M, K, N = 12, 24, 48


class Ranks:
    """Blocks by coordinate, and collectives on them."""

    def __init__(self, sizes: dict[str, int]):
        self.sizes = sizes
        self.axes = tuple(sizes)
        self.places = [dict(zip(self.axes, place)) for place in coordinates(*(range(n) for n in sizes.values()))]

    def cut(self, whole: np.ndarray, layout: Layout) -> Blocks:
        out = {}
        for place in self.places:
            ranges = layout.ranges(whole.shape, self.sizes, place)
            out[tuple(place.values())] = whole[tuple(slice(*pair) for pair in ranges)]
        return out

    def peers(self, key: tuple[int, ...], axis: str) -> list[tuple[int, ...]]:
        at = self.axes.index(axis)
        return [(*key[:at], i, *key[at + 1 :]) for i in range(self.sizes[axis])]

    def gather(self, blocks: Blocks, axis: str, dim: int) -> Blocks:
        return {key: np.concatenate([blocks[peer] for peer in self.peers(key, axis)], dim) for key in blocks}

    def sum(self, blocks: Blocks, axis: str) -> Blocks:
        return {key: sum(blocks[peer] for peer in self.peers(key, axis)) for key in blocks}

    def scatter(self, blocks: Blocks, axis: str, dim: int) -> Blocks:
        at, summed = self.axes.index(axis), self.sum(blocks, axis)
        return {key: np.split(block, self.sizes[axis], dim)[key[at]] for key, block in summed.items()}


def play(product: Product, ranks: Ranks, x: np.ndarray, w: np.ndarray, dy: np.ndarray) -> tuple[Blocks, Blocks, Blocks]:
    """(Y, dX, dW) per coordinate, by the moves that the product names."""
    dim = {"rows": 0, "features": 1}

    def move(blocks: Blocks, how: Move | None, operation: str) -> Blocks:
        return blocks if how is None else getattr(ranks, operation)(blocks, how.axis, dim[how.dim])

    whole_x = move(ranks.cut(x, as_layout(product.x)), product.gather_x, "gather")
    whole_w = ranks.cut(w, product.weight)
    for axis in product.gather_w:
        whole_w = ranks.gather(whole_w, axis, 0)
    y = {key: whole_x[key] @ whole_w[key].T for key in whole_x}
    y = move(y, product.scatter_y, "scatter")
    y = ranks.sum(y, product.sum_y) if product.sum_y else y
    grad = move(ranks.cut(dy, as_layout(product.y)), product.scatter_y, "gather")
    dx = {key: grad[key] @ whole_w[key] for key in grad}
    dx = move(dx, product.gather_x, "scatter")
    dx = ranks.sum(dx, product.sum_x) if product.sum_x else dx
    dw = {key: grad[key].T @ whole_x[key] for key in grad}
    for axis in reversed(product.gather_w):
        dw = ranks.scatter(dw, axis, 0)
    for axis in product.partial_weight:
        dw = ranks.sum(dw, axis)
    return y, dx, dw


def as_layout(activation: ActivationLayout) -> Layout:
    return Layout((activation.rows, activation.features))


@pytest.mark.parametrize("name", CASES)
def test_every_form_computes_the_product_and_its_gradients(name: str) -> None:
    product, sizes = CASES[name]
    rng, ranks = np.random.default_rng(0), Ranks(sizes)
    x, w, dy = rng.standard_normal((M, K)), rng.standard_normal((N, K)), rng.standard_normal((M, N))
    y, dx, dw = play(product, ranks, x, w, dy)
    for found, whole, layout in (
        (y, x @ w.T, as_layout(product.y)),
        (dx, dy @ w, as_layout(product.x)),
        (dw, dy.T @ x, product.weight),
    ):
        expected = ranks.cut(whole, layout)
        for key in found:
            np.testing.assert_allclose(found[key], expected[key], atol=1e-12, err_msg=f"{name} at {key}")


def test_without_the_sum_over_depth_the_weight_gradient_is_that_of_one_slice() -> None:
    product = products.stationary_y(DEEP)
    assert product.partial_weight == ("depth",) == product.weight_layout.partial
    assert products.stationary_y(GRID).partial_weight == () == products.cube(CUBE).partial_weight


@pytest.mark.parametrize(
    ("product", "sizes", "expected"),
    [  # the reference's table: received elements of one Linear, forward and backward, gathers saved; c = (q - 1) / q^2
        (products.stationary_y(GRID), SQUARE, 2 * 0.25 * (M * K + K * N)),
        (products.stationary_x(GRID), SQUARE, 2 * 0.25 * (M * N + K * N)),
        (products.stationary_w(GRID), SQUARE, 2 * 0.25 * (M * K + M * N)),
        (products.summa(GRID), SQUARE, 3 * 0.25 * (M * K + K * N)),
        (products.cube(CUBE), EIGHT, 2 * (1 / 8) * (M * K + K * N + M * N)),
    ],
)
def test_volumes_are_those_of_the_papers(product: Product, sizes: dict[str, int], expected: float) -> None:
    assert sum(t.received(sizes) for t in transfers(product, M, K, N, sizes)) == pytest.approx(expected)


def test_gathering_again_costs_the_gathers_once_more() -> None:
    for product, sizes in ((products.stationary_y(GRID), SQUARE), (products.cube(CUBE), EIGHT)):
        saved, lean = (transfers(product, M, K, N, sizes, save_gathered=flag) for flag in (True, False))
        again = [t for t in lean if t.again]
        assert len(lean) - len(saved) == len(again) == 2
        assert {t.operand for t in again} == {"x", "w"}


def test_axes_of_one_rank_move_nothing() -> None:
    moved = transfers(products.stationary_y(GRID), M, K, N, {"row": 1, "col": 4})
    assert {t.axis for t in moved} == {"col"}


def test_a_lookup_moves_the_table_and_the_rows_but_no_ids() -> None:
    head = products.stationary_y(GRID)
    table = products.lookup(GRID, head.weight, head.gather_w, Move("features", "col"))
    moved = transfers(table, M, 37, K, SQUARE)  # 37 token ids: 19 and 18 by column, 10 by row with padding
    assert [(t.phase, t.operand, t.elements) for t in moved] == [
        ("forward", "w", 20 * K),
        ("forward", "y", M // 2 * K),
        ("backward", "dy", M // 2 * K),
        ("backward", "dw", 20 * K),
    ]
    assert prod(table.x.local(M, 37, SQUARE)) == M // 2 * 19
