"""The score of predicted memory on published plans: what it counts, and what the prediction reaches on some of them."""

from __future__ import annotations

import pytest

from benchmarks import foresight_memory
from benchmarks.foresight_memory import GIB, Row, cuts, rows_of, scores

SIZES = {"h": "3072", "ffn": "8192", "V": "131072", "L": "28"}


def test_rows_are_counted_by_what_happened_and_what_was_predicted():
    rows = [
        Row("a", "ddp", True, True, 10.0, 11.0, "yes"),
        Row("b", "ddp", True, True, 10.0, 8.0, "no"),
        Row("c", "ddp", True, False, None, 90.0, "no"),
        Row("d", "ddp", True, False, None, 78.0, "unknown"),
        Row("e", "ddp", True, False, None, 20.0, "yes"),
        Row("more stages than layers", "ddp", True, False),
    ]
    score = scores(rows)
    assert score["mape"] == pytest.approx(0.15) and score["median_error"] == pytest.approx(-0.05)
    assert (score["ran"], score["ran_called_impossible"]) == (2, 1)
    assert (score["failed"], score["failed_otherwise"]) == (4, 1)
    names = ("failed_predicted_no", "failed_predicted_unknown", "failed_predicted_yes")
    assert [score[name] for name in names] == [1, 1, 1]


@pytest.mark.parametrize(("stages", "first"), [(1, 29), (2, 16), (4, 8), (8, 4), (16, 2)])
def test_stages_end_with_the_block_that_takes_them_above_their_share(stages, first):
    """A head of 131,072 words costs as much as 3.6 layers."""
    found = cuts({**SIZES, "pp": str(stages)})
    names = [*(f"layers.{number}" for number in range(28)), "head"]
    assert len(set(found)) == len(found) == stages - 1 and found == sorted(found, key=names.index)
    assert [*found, "head"][0] == (names[first] if stages > 1 else "head")


def test_published_plans_that_ran_fit_and_most_that_failed_do_not():
    rows = [row for row in rows_of(every=23) if row.inside_node]
    score = scores(rows)
    assert len(rows) > 20 and score["ran_called_impossible"] == 0 and score["mape"] < 0.15
    assert score["failed_predicted_no"] >= 0.7 * sum(row.may_be_memory for row in rows) > 2


def test_memory_is_in_gib_and_of_the_heaviest_rank():
    (row,) = [row for row in foresight_memory.rows_of(every=828)][:1]  # tp=8, 3.6 B weights: 20 bytes each, and more
    assert row.predicted_gib is not None and row.measured_gib is not None
    assert 20 * 3.57e9 / 8 / GIB < row.predicted_gib < 1.1 * row.measured_gib
