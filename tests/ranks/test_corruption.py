"""Wrong bits in one rank of a real training are found in the next check, its rank is named, the steps are undone."""

from __future__ import annotations

import pytest

from parallelrun.errors import EXIT_CORRUPTION, CorruptionError
from tests.corruption import (
    ACTIVATIONS,
    BASE,
    FLIP,
    GRADIENTS,
    PLANS,
    SEVERAL,
    STUCK,
    SUMS,
    WEIGHTS,
    Case,
    Fault,
    judge,
    run,
)
from tests.matrix import FULL
from tests.plans import tiny_plan

CASES = [
    ("ddp", FLIP, WEIGHTS, 3, False),
    ("ddp", STUCK, GRADIENTS, 3, False),
    ("ddp", FLIP, SUMS, 3, False),  # the repetition says which of the two replicas was wrong
    ("ring", SEVERAL, SUMS, 2, False),  # two of three replicas agree
    ("zero1", SEVERAL, WEIGHTS, 2, False),
    ("fsdp", FLIP, ACTIVATIONS, 1, True),
    ("fsdp", STUCK, ACTIVATIONS, 4, False),
    ("tp", SEVERAL, GRADIENTS, 1, True),
    ("ptdp", STUCK, ACTIVATIONS, 3, False),
    ("ptdp", FLIP, GRADIENTS, 1, True),
    ("one", STUCK, WEIGHTS, 2, False),
    ("gshard", FLIP, SUMS, 1, True),
]
SHOWN = CASES if FULL else CASES[::2]


@pytest.mark.parametrize("plan,kind,place,every,recompute", SHOWN, ids=["-".join(map(str, one)) for one in SHOWN])
def test_a_fault_is_found_and_its_rank_named(tmp_path, run_ranks, plan, kind, place, every, recompute):
    world = tiny_plan({**BASE, **PLANS[plan]}).world
    step = 4  # the first after a check where N is 3, so that wrong weights have time to spread
    case = Case(plan, PLANS[plan], Fault(kind, place, world - 1, step, 7), every, recompute)
    (tmp_path / "clean").mkdir()
    (tmp_path / "wrong").mkdir()
    clean = run_ranks(world, run, {**BASE, **PLANS[plan]}, None, tmp_path / "clean")
    found = run_ranks(world, run, case.all_overrides, case.fault, tmp_path / "wrong")
    result = judge(case, clean, found)
    assert result.acted, "the fault changed nothing"
    assert result.is_right, (result, found[0].events, [one.error for one in found])


@pytest.mark.parametrize("plan", [*PLANS] if FULL else ["ptdp", "gshard"])
def test_a_run_without_faults_has_the_same_bits_and_no_alarm(tmp_path, run_ranks, plan):
    over = {**BASE, **PLANS[plan], "dropout": 0.1}
    world = tiny_plan(over).world
    (tmp_path / "plain").mkdir()
    (tmp_path / "watched").mkdir()
    plain = run_ranks(world, run, over, None, tmp_path / "plain")
    watched = run_ranks(world, run, {**over, "sdc.every": 3, "sdc.recompute": True}, None, tmp_path / "watched")
    assert not watched[0].events and [one.state for one in plain] == [one.state for one in watched]


def test_a_gradient_that_is_huge_on_one_rank_does_not_part_the_ranks(tmp_path, run_ranks):
    """Ranks that measure the norm alone do not agree on whether it is finite: the highest bit of an exponent."""
    found = run_ranks(2, run, {**BASE, "dp": 2, "sdc.every": 3}, Fault(FLIP, SUMS, 1, 4, 7, bit=30), tmp_path)
    assert found[1].planted[:1] == [4] and found[0].events and not any(one.error for one in found)


def test_a_broken_device_has_an_exit_code_of_its_own():
    assert CorruptionError("x").exit_code == EXIT_CORRUPTION == 9
