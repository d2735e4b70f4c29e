"""The robust fit: constants that are known are found again."""

from __future__ import annotations

from math import exp, log, sqrt

import pytest

from parallelrun.cli.calibration.fit import Constant, fit

CONSTANTS = (Constant("rate", 1.0, 1e-3, 1e3), Constant("each", 1.0, 1e-3, 1e3))
TRUE = (3.0, 0.02)
SIZES = [(work, calls) for work in (0.1, 1.0, 10.0, 100.0) for calls in (1, 30, 300)]


def predict(values):
    rate, each = values
    return [work / rate + calls * each for work, calls in SIZES]


def found(measured, constants=CONSTANTS, predicted=predict):
    return fit(constants, predicted, measured, [0.05] * len(measured))


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


def test_the_fit_is_where_the_loss_is_least():
    """Of two measurements that contradict each other: against a table of the loss, in steps of a ten-thousandth."""
    measured, expected, constant = [1.0, 3.0], [0.05, 0.4], Constant("each", 2.0, 0.01, 100.0, factor=1.5)

    def loss(value):
        residuals = [log(value / one) / error for one, error in zip(measured, expected)]
        return sum(sqrt(1 + one**2) - 1 for one in residuals) + 0.5 * (log(value / 2.0) / log(1.5)) ** 2

    least = min((exp(step / 10_000) for step in range(-2000, 12_000)), key=loss)
    result = fit([constant], lambda values: [values[0], values[0]], measured, expected)
    assert result.values[0] == pytest.approx(least, rel=1e-3)
