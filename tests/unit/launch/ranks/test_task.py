"""Temporary directories of tasks: gone after them, kept where a rank has failed, whose log is named."""

import tempfile
from pathlib import Path

import pytest

from parallelrun.base.errors import (
    EXIT_ENVIRONMENT,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_RANK_DIED,
    EXIT_TERMINATED,
    EnvironmentProblem,
    Problem,
)
from parallelrun.base.stop_signals import Terminated
from parallelrun.config.schema.run_schema import Config
from parallelrun.launch.failures.failure import Failure
from parallelrun.launch.failures.outcome import Outcome
from parallelrun.launch.host.output import log_path
from parallelrun.launch.ranks import supervisor
from parallelrun.launch.ranks.task import TaskFailed, run_task, task_root
from parallelrun.planner.resolve.resolve_config import resolve


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Run a task whose ranks end as told, in a temporary directory under tmp_path."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def run(outcome: Outcome) -> None:
        def supervise(job):
            log_path(job.directory, 1).write_text("the stacks")
            return outcome

        monkeypatch.setattr(supervisor, "supervise", supervise)
        config = Config(dp=2)
        with task_root("try") as root:
            run_task(root, config, resolve(config), "module:function")

    return run


def test_a_failed_rank_is_named_with_its_log_which_is_kept(run, tmp_path):
    with pytest.raises(TaskFailed, match=r"^rank 1 of 2: it broke ") as failed:
        run(Outcome(EXIT_RANK_DIED, Failure(1, "it broke", EXIT_RANK_DIED)))
    log = str(failed.value).partition("its log: ")[2].rstrip(")")
    assert Path(log).read_text() == "the stacks"
    assert Path(log).is_relative_to(tmp_path)


EXPLAINED = Outcome(EXIT_ENVIRONMENT, Failure(0, "no memory", EXIT_ENVIRONMENT, problems=(Problem("no memory"),)))


@pytest.mark.parametrize(
    "outcome, error",
    [
        (Outcome(EXIT_INTERRUPTED), KeyboardInterrupt),
        (Outcome(EXIT_TERMINATED), Terminated),
        (EXPLAINED, EnvironmentProblem),
    ],
)
def test_nothing_is_left_where_no_log_is_needed(run, tmp_path, outcome, error):
    with pytest.raises(error):
        run(outcome)
    assert not list(tmp_path.iterdir())


def test_nothing_is_left_of_a_task_that_ends_well(run, tmp_path):
    run(Outcome(EXIT_OK))
    assert not list(tmp_path.iterdir())
