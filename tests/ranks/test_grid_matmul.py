"""The product of the grid ways on real ranks: every form gives Y, dX, dW, db of one process, and sends as predicted."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
import torch

from parallelrun.planner.model.product import transfers
from tests.pool import run_ranks
from tests.ranks.grid_matmul_body import SAMPLES, SEQ, Case, Found, prove, prove_all, split_all

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
    apart = [] if "summa" in form else [replace(case, outputs=QKV, fused=False)]  # SUMMA is always one node
    return [case, replace(case, outputs=QKV), *panels, *apart]


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
    assert_proved([variants(form, DEEP)[1] for form in forms])


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


FORMS_ON = [((*GATHERS, "summa"), SQUARE), (CUBES, CUBE)]
APART_ON = [(GATHERS, SQUARE), (CUBES, CUBE)]  # forms that a split backward allows: all but SUMMA


@pytest.mark.parametrize(("forms", "sizes"), FORMS_ON, ids=["4 ranks", "8 ranks"])
def test_gathering_again_computes_bitwise_what_keeping_does_and_keeps_local_operands_only(forms, sizes):
    kept = [Case(form, sizes, outputs=QKV) for form in forms]
    lean = [replace(case, save_gathered=False) for case in kept]
    found = run([*kept, *lean])
    for case, with_kept, without in zip(lean, found[: len(forms)], found[len(forms) :], strict=True):
        for one, other in zip(with_kept, without):
            for name, value in one.values.items():
                assert torch.equal(value, other.values[name]), (case, name)
            assert other.counted == other.predicted, case
            assert other.saved == local_input(case), case
            assert one.saved == (local_input(case) if case.product.panels else gathered_operands(case)), case


def local_input(case: Case) -> int:
    return SAMPLES * SEQ * case.features // prod(case.sizes.values())


def gathered_operands(case: Case) -> int:
    """Elements of X, gathered or as it lies, and of what is gathered of W."""
    moves = transfers(case.product, SAMPLES * SEQ, case.features, sum(case.outputs), case.sizes)
    gathered = {
        move.operand: move.elements for move in moves if (move.phase, move.operation) == ("forward", "all_gather")
    }
    return gathered.get("x", local_input(case)) + gathered.get("w", 0)


@pytest.mark.parametrize(("forms", "sizes"), APART_ON, ids=["4 ranks", "8 ranks"])
def test_nodes_of_their_own_compute_bitwise_the_same(forms, sizes):
    """On small integers, which are exact in whatever order they are summed."""
    fused = [Case(form, sizes, outputs=QKV, whole=True) for form in forms]
    found = run([*fused, *(replace(case, fused=False) for case in fused)])
    for case, together, apart in zip(fused, found[: len(forms)], found[len(forms) :], strict=True):
        for one, other in zip(together, apart):
            for name, value in one.values.items():
                assert torch.equal(value, other.values[name]), (case, name)


@pytest.mark.parametrize(("forms", "sizes"), APART_ON, ids=["4 ranks", "8 ranks"])
def test_a_split_backward_sends_what_belongs_to_each_half_once(forms, sizes):
    cases = [Case(form, sizes, outputs=QKV, fused=False) for form in forms]
    cases += [replace(case, bias=False) for case in cases]  # what a product gives is then what a stage gives
    for case, ranks in zip(cases, zip(*run_ranks(prod(sizes.values()), split_all, cases)), strict=True):
        for found in ranks:
            assert max(found.errors.values()) < BOUND, (case, found.errors)
            purposes = [{row.purpose for row in rows if row.calls} for rows in (found.counted, found.predicted)]
            assert "weight_gradients" not in purposes[0], (case, found.counted)
            assert purposes[1] == ({"weight_gradients"} if case.product.gather_w else set()), (case, found.predicted)


HALF = ("stationary_y", "stationary_x", "stationary_w", "summa", "grid table")


def test_half_precision_computes_in_bf16_and_sums_weight_gradients_in_fp32():
    cases = [Case(form, SQUARE, compute=torch.bfloat16, reduce=torch.float32, stored=torch.float32) for form in HALF]
    cases += [replace(case, outputs=QKV) for case in cases[:-1]]
    cases += [replace(case, outputs=QKV, fused=False) for case in cases[: len(GATHERS) - 1]]
    for case, ranks in zip(cases, run(cases), strict=True):
        for found in ranks:
            assert 1e-5 < max(found.errors.values()) < 2e-2, (case, found.errors)
            assert found.counted == found.predicted, case  # in bytes: 2 an element, 4 of a weight gradient
            assert found.values["y0"].dtype == torch.bfloat16 and found.values["weight0"].dtype == torch.float32


def test_without_an_input_gradient_nothing_is_moved_for_it():
    cases = [Case(form, SQUARE, input_gradient=False, save_gathered=False) for form in (*GATHERS, "summa")]
    assert_proved(cases)
    for ranks in run(cases):
        assert "x" not in ranks[0].values
