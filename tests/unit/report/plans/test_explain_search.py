"""How a flip is said: in the figures that an engineer has."""

from __future__ import annotations

import pytest

from parallelrun.planner.predict import limits as limit_names
from parallelrun.planner.predict.limits import Limit
from parallelrun.planner.predict.step_time.spread import BUBBLE
from parallelrun.planner.predict.step_time.step import StepTime
from parallelrun.planner.search.crossovers import Flip
from parallelrun.planner.search.result import Found
from parallelrun.report.plans import explain_search
from parallelrun.report.plans.explain_search import flip_texts

BEST = Found(("dp=8", "tp=2", "micro_batch=1"), None, 0, "yes")
OTHER = Found(("dp=4", "tp=4", "micro_batch=1"), None, 0, "yes")
BETWEEN, INSIDE, SEQ = "cluster.inter_gb_s", "cluster.intra_gb_s", "model.seq"


def flip(key: str, now: float, value: float, winner: Found | None = OTHER, **bounds: float) -> Flip:
    return Flip(key, now, value, winner, hidden=4096, tokens=8192, **bounds)


FLIPS = [
    (flip(SEQ, 8192, 1900), "below 1,900 tokens per microbatch (now 8,192), M/h below 0.464"),
    (flip(SEQ, 8192, 16384), "above 16,384 tokens per microbatch (now 8,192), M/h above 4"),
    (flip("global_batch", 64, 32), "below 32 samples a step (now 64)"),
    (flip(BETWEEN, 50, 40), "where links between hosts are slower than 40 GB/s (now 50)"),
    (flip(INSIDE, 50, 400), "where links inside a host are faster than 400 GB/s (now 50)"),
    (flip(BETWEEN, 50, 40, least=6144),
     "where M/h exceeds 1.5 and links between hosts are slower than 40 GB/s (now 2 and 50)"),
    (flip(INSIDE, 50, 40, most=12288),
     "where M/h is below 3 and links inside a host are slower than 40 GB/s (now 2 and 50)"),
]  # fmt: skip


@pytest.mark.parametrize(("one", "condition"), FLIPS)
def test_a_flip_of_a_search(one, condition):
    assert flip_texts([one], True, BEST) == [f"another plan wins {condition}: dp=4 tp=4"]


def test_a_flip_of_a_plan_that_is_named():
    (text,) = flip_texts([flip(BETWEEN, 50, 400, None)], True, None)
    assert text == "this plan is faster than the fastest where links between hosts are faster than 400 GB/s (now 50)"


def test_no_flips_and_flips_that_were_not_looked_for():
    (none,), (named,) = flip_texts([], True, BEST), flip_texts([], True, None)
    assert none.startswith("the same plan is fastest") and named.startswith("this plan is not faster")
    assert flip_texts([flip(SEQ, 8192, 1900)], False, BEST)[1].startswith("the list may be incomplete")


def test_each_limit_is_a_sentence_about_the_resource_that_would_be_free():
    names = [*limit_names.FREE, BUBBLE]
    step = StepTime(2.0, 2.0, 2.0, 1.0, 0.5, {"products": 2.0})
    texts = [str(text) for _, text in explain_search.limit_rows(step, [Limit(name, 1.0) for name in names])]
    assert texts[names.index("memory bandwidth")] == "with unlimited memory bandwidth a step would be 1 s (50%) shorter"
    assert texts[names.index(BUBBLE)] == "without bubble a step would be 1 s (50%) shorter"
    assert set(explain_search.FREE) < set(names)
