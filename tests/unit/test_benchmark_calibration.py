"""The scores of `benchmarks.calibration`, and that its plans are legal and not those of the calibration."""

from __future__ import annotations

import pytest

from benchmarks.calibration import PLANS, line, scores
from parallelrun.cli.calibration.session import composed
from parallelrun.cli.calibration.training import STEPS
from parallelrun.planner.resolve.freeze import freeze


def rows(*pairs):
    return [{"case": "a", "ranks": 2, "predicted_s": one, "measured_s": two, "spread": 0.1} for one, two in pairs]


def test_errors_and_order():
    found = scores(rows((1.0, 1.0), (2.2, 2.0), (1.5, 3.0), (3.1, 3.2)))
    assert found["plans"] == 4 and found["largest_error"] == pytest.approx(0.5)
    assert found["median_error"] == pytest.approx((0.1 + 0.03125) / 2)
    assert found["pairs"] == 5, "3.0 and 3.2 are too close"
    assert found["right_order"] == pytest.approx(4 / 5), "1.5 is predicted for 3.0, and 2.2 for 2.0"
    assert "+10%" in line(rows((2.2, 2.0))[0])


@pytest.mark.slow
def test_the_plans_are_legal_and_unseen():
    seen = {freeze(*composed([*words, "dataset=synthetic"])) for _, words in STEPS}
    asked = {name: freeze(*composed([*words, "dataset=synthetic"])) for name, words in PLANS.items()}
    assert len(set(asked.values())) == len(PLANS) >= 12 and not seen & set(asked.values())
