"""How a crossover is said: in the figures that an engineer has."""

from __future__ import annotations

import pytest

from parallelrun.planner.predict import limits as limit_names
from parallelrun.planner.predict.limits import Limit
from parallelrun.planner.predict.step_time.spread import BUBBLE
from parallelrun.planner.predict.step_time.step import StepTime
from parallelrun.planner.search.crossovers import Crossover
from parallelrun.planner.search.result import Found
from parallelrun.report.plans import explain_search
from parallelrun.report.plans.explain_search import crossover_texts

BEST = Found(("dp=8", "tp=2", "micro_batch=1"), None, 0, "yes")
OTHER = Found(("dp=4", "tp=4", "micro_batch=1"), None, 0, "yes")
BETWEEN, INSIDE, SEQ = "cluster.inter_gb_s", "cluster.intra_gb_s", "model.seq"


def crossover(key: str, now: float, value: float) -> Crossover:
    return Crossover(key, now, value, OTHER, hidden=4096)


@pytest.mark.parametrize(
    ("one", "condition"),
    [
        (crossover(SEQ, 8192, 1900), "below 1,900 tokens per microbatch (now 8,192), M/h below 0.464"),
        (crossover(SEQ, 8192, 16384), "above 16,384 tokens per microbatch (now 8,192), M/h above 4"),
        (crossover("global_batch", 64, 32), "below 32 samples a step (now 64)"),
        (crossover(BETWEEN, 50, 40), "where links between hosts are slower than 40 GB/s (now 50)"),
        (crossover(INSIDE, 50, 400), "where links inside a host are faster than 400 GB/s (now 50)"),
    ],
)
def test_a_crossover_of_a_search(one, condition):
    assert crossover_texts([one], True, BEST) == [f"another plan wins {condition}: dp=4 tp=4"]


def test_no_crossovers_and_crossovers_that_were_not_looked_for():
    (none,) = crossover_texts([], True, BEST)
    assert none.startswith("the same plan is fastest")
    assert crossover_texts([crossover(SEQ, 8192, 1900)], False, BEST)[1].startswith("the list may be incomplete")


def test_each_limit_is_a_sentence_about_the_resource_that_would_be_free():
    names = [*limit_names.FREE, BUBBLE]
    step = StepTime(2.0, 2.0, 2.0, 1.0, 0.5, {"products": 2.0})
    texts = [str(text) for _, text in explain_search.limit_rows(step, [Limit(name, 1.0) for name in names])]
    assert texts[names.index("memory bandwidth")] == "with unlimited memory bandwidth a step would be 1 s (50%) shorter"
    assert texts[names.index(BUBBLE)] == "without bubble a step would be 1 s (50%) shorter"
    assert set(explain_search.FREE) < set(names)
