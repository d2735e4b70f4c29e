"""Whether a failed run is restarted, from the attempts alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parallelrun.base.errors import EXIT_NO_PROGRESS
from parallelrun.launch.failures.restart_policy import decide, num_without_progress
from parallelrun.report.records.attempts import Attempt


def failed(step, saved=0, **more) -> Attempt:
    fields = {"exit_code": 6, "rank": 0, "host": "h", "stepping": 1.0, "number": 1, **more}
    return Attempt(world=4, degrees={"dp": 4}, step=step, saved=saved, **fields)


@pytest.mark.parametrize("code", [2, 3, 4, 5, 75, 130, 143])
def test_what_would_come_again_or_was_wanted_is_not_restarted(code):
    decision = decide([failed(7, exit_code=code)], 3)
    assert not decision.restart and decision.why and not decision.exit_code


@pytest.mark.parametrize("code", [1, 6, 7])
def test_deaths_and_hangs_are_restarted_until_the_restarts_are_used_up(code):
    first, second = failed(7, exit_code=code), failed(9, exit_code=code)
    assert decide([first], 1).restart
    used_up = decide([first, second], 1)
    assert not used_up.restart and used_up.why == "restarts=1 is used up"
    assert not decide([first], 0).restart


def test_an_exception_before_any_step_is_not_restarted_but_a_death_is():
    assert not decide([failed(0, stepping=None, raised=True)], 3).restart
    assert decide([failed(0, stepping=None)], 3).restart
    later = [failed(5), failed(5, stepping=None, raised=True)]
    assert decide(later, 3).restart


def test_three_attempts_without_progress_end_the_run_with_a_code_of_their_own():
    stuck = [failed(5, 3), failed(5, 3, rank=1), failed(4, 3, rank=2), failed(5, 3, rank=3)]
    assert [num_without_progress(stuck[: n + 1]) for n in range(4)] == [0, 1, 2, 3]
    assert decide(stuck[:3], 9).restart
    assert decide(stuck, 9).exit_code == EXIT_NO_PROGRESS
    assert decide([failed(0)] * 3, 9).exit_code == EXIT_NO_PROGRESS
    assert decide([*stuck[:3], failed(6, 3)], 9).restart  # a new step
    assert decide([*stuck[:3], failed(4, 4)], 9).restart  # a new checkpoint


def test_memory_that_is_too_small_twice_at_the_same_step_ends_the_run():
    one = failed(5, memory=True)
    assert decide([one], 9).restart
    assert "memory" in decide([one, one], 9).why
    assert decide([one, failed(6, memory=True)], 9).restart


def test_the_rank_that_fails_twice_without_progress_cannot_be_replaced():
    one = failed(5, rank=2)
    assert decide([one], 9).without is None
    assert decide([one, one], 9).without == 2
    assert decide([one, failed(6, rank=2)], 9).without is None
    assert decide([one, failed(5, rank=1)], 9).without is None
    assert decide([one, replace(one, world=3)], 9).without is None  # another plan: another rank


def test_a_checkpoint_that_cannot_be_loaded_is_replaced_by_an_older_one():
    loading = failed(6, exit_code=4, stepping=None, checkpoint="step_6", resumed_step=6)
    decision = decide([failed(7), loading], 3)
    assert decision.restart and decision.bad_checkpoint
    assert not decide([failed(7), replace(loading, stepping=1.0)], 3).restart  # a data file, while training
