"""The product of the grid ways on real ranks: every form gives Y, dX, dW, db of one process, and sends as foretold."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest

from tests.pool import run_ranks
from tests.ranks.grid_matmul_body import Case, Found, prove, prove_all

BOUND = 1e-12
SQUARE, OBLONG, DEEP, CUBE = (
    {"row": 2, "col": 2},
    {"row": 2, "col": 3},
    {"depth": 2, "row": 2, "col": 2},
    {"x": 2, "y": 2, "z": 2},
)
QKV = (48, 24, 24)
GATHERS = ("stationary_y", "stationary_x", "stationary_w", "stationary_w, the way back")
CUBES = ("cube", "cube, the way back", "cube stationary_y")


def run(cases: list[Case]) -> list[list[Found]]:
    """By case, what each rank found."""
    return list(zip(*run_ranks(prod(cases[0].sizes.values()), prove_all, cases)))


def assert_proved(cases: list[Case], bound: float = BOUND) -> None:
    for case, ranks in zip(cases, run(cases), strict=True):
        for found in ranks:
            compared = {"y0", "weight0"} | ({"x"} if case.input_gradient and not case.product.lookup else set())
            assert compared <= set(found.errors), case
            assert max(found.errors.values()) < bound, (case, found.coordinate, found.errors)
            assert found.counted == found.predicted, (case, found.coordinate)


def variants(form: str, sizes: dict[str, int]) -> list[Case]:
    """One output and three of different sizes, gathered operands kept or not, fused or apart."""
    case = Case(form, sizes)
    panels = [] if "summa" in form else [replace(case, outputs=QKV, save_gathered=False)]
    return [case, replace(case, outputs=QKV), *panels, replace(case, outputs=QKV, fused=False)]


@pytest.mark.parametrize("form", [*GATHERS, "summa"])
def test_2d(form):
    assert_proved(variants(form, SQUARE))


@pytest.mark.parametrize("sizes", [OBLONG, {"row": 3, "col": 2}], ids=["2x3", "3x2"])
def test_2d_on_a_grid_that_is_not_square(sizes):
    assert_proved([case for form in (*GATHERS, "summa") for case in variants(form, sizes)[1:]])


def test_2d_on_one_row():  # the row axis has degree 1: nothing moves over it, and nothing is taken for it
    row = {"row": 1, "col": 4}
    assert_proved([variants(form, row)[1] for form in GATHERS] + [Case("grid table", row)])


def test_25d():
    forms = ("deep stationary_y", "deep stationary_x", "deep stationary_w", "deep summa")
    assert_proved([variants(form, DEEP)[1] for form in forms] + [variants("deep summa", DEEP)[-1]])


def test_25d_without_the_sum_over_depth_has_the_weight_gradient_of_one_slice():
    found = run_ranks(8, prove, Case("deep stationary_y", DEEP), False)
    for one in found:
        assert one.errors["weight0"] > 0.1 and one.errors["bias0"] > 0.1, one.errors
        assert max(one.errors["y0"], one.errors["x"]) < BOUND


@pytest.mark.parametrize("form", CUBES)
def test_3d(form):
    assert_proved(variants(form, CUBE)[1:])


TABLES = [("grid table", SQUARE), ("grid table", OBLONG), ("deep table", DEEP), ("cube table", CUBE)]
HEADS = [("stationary_y", SQUARE), ("stationary_y", OBLONG), ("deep stationary_y", DEEP), ("cube", CUBE)]
UNEVEN = {"bias": False, "features": 24}


@pytest.mark.parametrize(("form", "sizes"), TABLES, ids=str)
def test_lookups_in_a_vocabulary_of_37(form, sizes):
    assert_proved([Case(form, sizes, outputs=(24,))])


@pytest.mark.parametrize(("form", "sizes"), [*HEADS, ("cube stationary_y", CUBE)], ids=str)
def test_heads_of_a_vocabulary_of_37(form, sizes):
    case = Case(form, sizes, outputs=(37,), bias=False)
    assert_proved([case, replace(case, save_gathered=False), replace(case, fused=False)])
