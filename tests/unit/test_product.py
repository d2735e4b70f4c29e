"""What the forms of a product move. `tests/ranks/test_grid_matmul.py` computes every form on real ranks."""

from __future__ import annotations

from math import prod

import pytest

from parallelrun.planner.model.product import ActivationLayout, Move, Product, transfers
from parallelrun.planner.model.product import forms as products

GRID, DEEP, CUBE = (
    ActivationLayout(("row",), ("col",)),
    ActivationLayout(("depth", "row"), ("col",)),
    ActivationLayout(("x", "y"), ("z",)),
)
SQUARE, EIGHT = {"row": 2, "col": 2}, {"x": 2, "y": 2, "z": 2}
M, K, N = 12, 24, 48


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
