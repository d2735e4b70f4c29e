"""The robust fit: constants that are known are found again."""

from __future__ import annotations

import pytest

from parallelrun.calibrate.fit import Constant, fit

CONSTANTS = (Constant("rate", 1.0, 1e-3, 1e3), Constant("each", 1.0, 1e-3, 1e3))
TRUE = (3.0, 0.02)
SIZES = [(work, calls) for work in (0.1, 1.0, 10.0, 100.0) for calls in (1, 30, 300)]


def predict(values):
    rate, each = values
    return [work / rate + calls * each for work, calls in SIZES]


def found(measured, constants=CONSTANTS, predicted=predict):
    return fit(constants, predicted, measured, [0.05] * len(measured))


def test_constants_are_found_from_far_away():
    result = found(predict(TRUE))
    assert result.values == pytest.approx(TRUE, rel=0.01)
    assert max(map(abs, result.errors)) < 0.01


def test_single_outliers_do_not_decide():
    measured = predict(TRUE)
    for index in (2, 7):
        measured[index] *= 8.0
    assert found(measured).values == pytest.approx(TRUE, rel=0.05)


def test_what_nothing_depends_on_keeps_its_start_and_nothing_leaves_its_bounds():
    constants = (*CONSTANTS, Constant("unused", 7.0, 0.1, 100.0), Constant("share", 0.5, 0.1, 1.0))

    def predicted(values):
        rate, each, _, share = values
        return [seconds / share for seconds in predict((rate, each))]

    result = found([seconds / 40 for seconds in predict(TRUE)], constants, predicted)
    assert result.values[2] == pytest.approx(7.0) and result.values[3] <= 1.0


def test_a_time_that_is_not_positive_is_no_reason_to_fail():
    assert found(predict(TRUE), predicted=lambda values: [0.0] * len(SIZES)).values == pytest.approx((1.0, 1.0))
