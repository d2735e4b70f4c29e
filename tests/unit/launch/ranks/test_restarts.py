"""What decides, beside the policy, whether another attempt begins."""

from __future__ import annotations

import signal

from parallelrun.launch.failures.failure import Failure
from parallelrun.launch.failures.outcome import Outcome
from parallelrun.launch.host.job import Job
from parallelrun.launch.ranks import restarts
from tests.plans import tiny_config, tiny_plan


def test_a_run_that_was_asked_to_stop_is_not_restarted_although_a_rank_has_failed(tmp_path, monkeypatch):
    attempts: list[int] = []
    outcome = Outcome(6, Failure(1, "died: SIGKILL", 6), step=3)

    def supervise(job: Job, signals: list[int]) -> Outcome:
        attempts.append(job.attempt)
        signals.append(signal.SIGTERM)
        return outcome

    monkeypatch.setattr(restarts.supervisor, "supervise", supervise)
    config = tiny_config(dp=2, restarts=3)
    ended = restarts.supervise(Job(config, tiny_plan(dp=2), tmp_path), config, [])
    assert (ended, attempts) == (outcome, [1])
