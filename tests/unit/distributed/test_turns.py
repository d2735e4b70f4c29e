"""Two passes take turns where they wait, in one order at any speed, and neither waits for one that has failed."""

from __future__ import annotations

import threading
import time
from contextvars import ContextVar

import pytest
import torch

from parallelrun.distributed.turns import Turns

CONTEXT: ContextVar[str] = ContextVar("tests_turns", default="none")


@pytest.fixture
def turns() -> Turns:
    return Turns(torch.device("cpu"))


def steps(turns: Turns, seen: list[str], name: str, number: int, seconds: float = 0.0):
    """A pass of so many steps, which hands over between them."""

    def run() -> str:
        for step in range(number):
            if step:
                turns.hand_over()
            time.sleep(seconds)
            seen.append(f"{name}{step}")
        return name

    return run


@pytest.mark.parametrize("seconds", [0.0, 0.01])
def test_passes_alternate_and_the_longer_one_goes_on_alone(turns, seconds):
    for first, second, expected in ((3, 2, "a0 b0 a1 b1 a2"), (1, 3, "a0 b0 b1 b2"), (2, 4, "a0 b0 a1 b1 b2 b3")):
        seen: list[str] = []
        assert turns.run(steps(turns, seen, "a", first, seconds), steps(turns, seen, "b", second)) == "a"
        assert " ".join(seen) == expected
    turns.hand_over()  # of one pass: nothing


def test_the_other_pass_may_be_let_run_to_its_end_first(turns):
    seen: list[str] = []

    def first() -> None:
        turns.let_other_end()
        seen.append("a0")

    turns.run(first, steps(turns, seen, "b", 3))
    assert seen == ["b0", "b1", "b2", "a0"]


def test_the_second_pass_has_the_context_of_the_first_and_a_thread_of_its_own(turns):
    seen: list[tuple[str, bool]] = []
    CONTEXT.set("of the step")
    turns.run(lambda: None, lambda: seen.append((CONTEXT.get(), threading.current_thread() is threading.main_thread())))
    assert seen == [("of the step", False)]


def test_a_pass_that_fails_ends_both(turns):
    def fails() -> None:
        turns.hand_over()
        raise ValueError("no memory")

    for passes in ((fails, steps(turns, [], "b", 9)), (steps(turns, [], "a", 9), fails), (lambda: None, fails)):
        seen: list[str] = []
        with pytest.raises(ValueError, match="no memory"):
            turns.run(*passes)
        turns.run(steps(turns, seen, "a", 2), steps(turns, seen, "b", 2))  # no thread of a failed pair is left
        assert seen == ["a0", "b0", "a1", "b1"]
