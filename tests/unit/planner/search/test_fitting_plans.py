"""What a search keeps of the plans that it finds, if it leaves out what is not wanted."""

from __future__ import annotations

from random import Random

import pytest

from parallelrun.planner.search.fitting_plans import FAR, Kept
from parallelrun.planner.search.result import TIE, Found


def plans(random: Random) -> list[tuple[str, float, Found]]:
    """Plans of a few shapes by ascending time, some equally fast."""
    seconds = sorted(random.choice((1.0, 1.001, 1.004, 1.02, 1.3, 1.9, 2.5)) for _ in range(random.randint(1, 30)))
    return [
        (random.choice("aaabbcd"), one, Found((str(number),), None, random.randint(1, 9), "yes"))
        for number, one in enumerate(seconds)
    ]


@pytest.mark.parametrize(
    ("number", "complexity"), [(1, None), (2, None), (3, None), (2, "dcba".index), (3, "dcba".index)]
)
def test_what_is_not_wanted_would_not_be_kept(number, complexity):
    left_out = 0
    for seed in range(300):
        found = plans(Random(seed))
        everything, wanted = Kept(number, complexity), Kept(number, complexity)
        for shape, seconds, plan in found:
            everything.add(shape, seconds, plan)
        for shape, seconds, plan in found:
            if wanted.ends(seconds):
                break
            if wanted.wants(shape, seconds):
                wanted.add(shape, seconds, plan)
        left_out += len(found) - len(wanted.all)
        near = [one for one in everything.chosen() if found[int(one.overrides[0])][1] <= FAR * found[0][1]]
        assert [one for one in wanted.chosen() if one in near] == near
        assert {one.overrides for one in wanted.chosen()} <= {one.overrides for one in everything.all}
    assert left_out > 300


def test_the_fastest_of_each_shape_is_kept_and_what_is_as_fast_as_the_first():
    kept = Kept(2)
    for number, (shape, seconds) in enumerate((("a", 1.0), ("a", 1.001), ("a", 1.002), ("a", 1.2), ("b", 1.5))):
        kept.add(shape, seconds, Found((str(number),), None, 1, "yes"))
    assert [one.overrides for one in kept.chosen()] == [("0",), ("1",), ("2",), ("4",)]
    assert not kept.wants("c", 1.6) and kept.ends(1.6)


def test_the_simplest_plan_that_ties_with_the_fastest_is_first():
    def kept(*plans: tuple[str, float]) -> list[str]:
        every = Kept(2, complexity="ab".index)
        for shape, seconds in plans:
            every.add(shape, seconds, Found((shape, str(seconds)), None, 1, "yes"))
        return [" ".join(plan.overrides) for plan in every.chosen()]

    slow = ("b", 1.0), ("b", 1.001)
    assert kept(*slow, ("a", (1 + TIE) * 1.0), ("a", 1.1)) == ["a 1.02", "b 1.0", "b 1.001"]
    assert kept(*slow, ("a", 1.021), ("a", 1.1)) == ["b 1.0", "b 1.001", "a 1.021"]
    waiting = Kept(1, complexity="ab".index)
    waiting.add("b", 1.0, Found(("b",), None, 1, "yes"))
    assert waiting.wants("a", 1.02) and not waiting.ends(1.02) and not waiting.wants("b", 1.02) and waiting.ends(1.03)
