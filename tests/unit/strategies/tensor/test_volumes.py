"""The volumes and break-evens that papers derive for tensor layouts, from the collectives that plans predict."""

from __future__ import annotations

from typing import Any

import pytest

from parallelrun.planner.model.product import ActivationLayout, Product, transfers
from parallelrun.planner.model.product import forms as products
from parallelrun.planner.predict import prediction
from tests.plans import tiny_plan

# Hidden is large, so that the norms' few numbers a row do not blur the papers' figures, which leave them out.
LARGE = {"model.hidden": 4096, "model.heads": 64, "model.seq": 128, "model.layers": 2, "global_batch": 64}
H, M = 4096, 128 * 64


def received(overrides: dict[str, Any]) -> float:
    """Elements that a rank receives for one layer and one microbatch: as many as it sends."""
    plan = tiny_plan({**LARGE, **overrides})
    rows = plan.tensor.collectives((plan.spec.block("layers.1"),), plan)
    return sum(prediction.wire_bytes(row, prediction.group_size(plan, row.axis)) for row in rows) / 4


@pytest.mark.parametrize(
    ("overrides", "elements"),
    [
        ({"tp": 4}, 6 * M * H),
        ({"tp": 4, "layout": "2d"}, 2 * M * H + 6 * H**2),
        ({"tp": 16, "layout": "2d"}, 1.5 * M * H + 4.5 * H**2),
        ({"tp": 64, "layout": "2d", "strategy.tensor.form": "summa"}, 2.30 * M * H + 3.94 * H**2),
        ({"tp": 64, "layout": "3d"}, 1.5 * M * H + 1.125 * H**2),
    ],
    ids=str,
)
def test_volumes_are_those_of_the_papers(overrides, elements):
    assert received(overrides) == pytest.approx(elements, rel=0.005)


@pytest.mark.parametrize(
    ("overrides", "ratio"),  # tokens of a microbatch per hidden feature above which the layout receives less than 1D
    [
        ({"tp": 4, "layout": "2d"}, 1.5),
        ({"tp": 4, "layout": "2d", "strategy.tensor.save_gathered": False}, 18 / 7),
        ({"tp": 8, "layout": "3d"}, 1.0),
    ],
    ids=str,
)
def test_a_layout_receives_less_than_1d_just_above_its_break_even_and_more_just_below(overrides, ratio):
    """With samples of one token, the batch is the number of tokens."""
    short = {"model.seq": 1, "model.hidden": 1024, "model.heads": 16}
    for factor, less in ((1.05, True), (0.95, False)):
        case = {**short, "global_batch": round(factor * ratio * 1024 / 8) * 8}
        assert (received({**case, **overrides}) < received({**case, "tp": overrides["tp"]})) == less


def test_the_reference_s_lean_figure_is_that_of_its_own_forms():
    """It multiplies the attention's output stationary-Y: 2.8. Stationary-X moves less there: 18/7, as above."""
    grid, sizes = ActivationLayout(("row",), ("col",)), {"row": 2, "col": 2}
    y, x = products.stationary_y(grid), products.stationary_x(grid)
    assert lean_break_even([y, y, y, x], sizes) == pytest.approx(2.77, abs=0.01)
    assert lean_break_even([y, x, y, x], sizes) == pytest.approx(18 / 7)


def lean_break_even(forms: list[Product], sizes: dict[str, int]) -> float:
    """M/h at which a gpt layer's products receive what 1D's do on as many ranks; volumes are lines in M."""

    def volume(m: int) -> float:
        linears = zip(forms, [(1, 3), (1, 1), (1, 4), (4, 1)])
        moved = (transfers(f, m, k * H, n * H, sizes, save_gathered=False) for f, (k, n) in linears)
        return sum(transfer.received(sizes) for layer in moved for transfer in layer)

    slope = (volume(2 * H) - volume(H)) / H
    return (volume(H) - slope * H) / (8 * 3 / 4 * H - slope) / H
