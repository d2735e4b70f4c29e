"""A save that fails on one rank: all ranks go on, try again, and give up, alike."""

from __future__ import annotations

import resource
import signal
import time
from contextlib import redirect_stdout
from io import StringIO

import pytest
import torch
import torch.distributed as dist

from parallelrun.base.context import WorkerContext
from parallelrun.base.errors import SaveFailed
from parallelrun.config.schema.run_schema import PrecisionConfig
from parallelrun.training.loop.build import build
from parallelrun.training.loop.checkpointing import Checkpoints
from parallelrun.training.loop.schedules import LossScaler
from tests.checkpoints import read_whole
from tests.matrix import FULL
from tests.plans import tiny_config, tiny_plan

CHANGES = {"dp": 2, "strategy.data.kind": "zero1", "steps": 8, "checkpoint.every": 2, "checkpoint.keep": 9}
WAITING = {**CHANGES, "checkpoint.asynchronous": False}
UNLIMITED = resource.getrlimit(resource.RLIMIT_FSIZE)


def save_in_turn(folder, changes, after_step):
    """Reach every step with `after_step(checkpoints, step, rank)`. What was said, told and raised, and the facts."""
    training = build(tiny_config(changes), tiny_plan(changes), torch.device("cpu"))
    rank, told, said, ended = training.mesh.rank, [], StringIO(), None
    context = WorkerContext(
        rank, 2, rank, torch.device("cpu"), folder, lambda *_: None, lambda: False, told.append, rank == 0
    )
    checkpoints = Checkpoints(training, LossScaler(PrecisionConfig(), scaled=False), context)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    for step in range(1, 9):
        try:
            with redirect_stdout(said):
                after_step(checkpoints, step, rank)
        except SaveFailed as error:
            ended = (step, error.exit_code)
            break
    limit_files(UNLIMITED[0])
    return said.getvalue(), told, ended, checkpoints.facts()


def limit_files(num_bytes):
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, UNLIMITED[1]))


def save_along(folder, without_room, stop_at):
    """At the steps of `without_room` rank 1 may write 4 KiB a file."""

    def after_step(checkpoints, step, rank):
        limit_files(4096 if rank == 1 and step in without_room else UNLIMITED[0])
        checkpoints.after_step(step, stopping=step == stop_at)

    return save_in_turn(folder, WAITING, after_step)


@pytest.mark.parametrize(
    "without_room, stop_at, saved, failed, ended",
    [
        pytest.param({4}, None, [2, 6, 8], [4], None, id="once"),
        pytest.param({2, 6}, None, [4, 8], [2, 6], None, id="twice_apart"),
        pytest.param({4, 6}, None, [2], [4, 6], (6, 3), id="twice_in_a_row"),
        pytest.param({8}, None, [2, 4, 6], [8], (8, 3), id="the_last"),
        pytest.param({3}, 3, [2], [3], (3, 3), id="preempted"),
    ],
)
def test_training_goes_on_until_it_makes_no_sense(tmp_path, run_ranks, without_room, stop_at, saved, failed, ended):
    results = run_ranks(2, save_along, tmp_path, without_room, stop_at)
    assert [(told, end, facts["failed_saves"]) for _, told, end, facts in results] == [(failed, ended, len(failed))] * 2
    said = results[0][0].splitlines()
    assert results[1][0] == "" and len(said) == len(failed) - (ended is not None)  # the last is told as the error
    for step, line in zip(failed, said):
        assert f"step {step} could not be written" in line and f"the next save is at step {step + 2}" in line
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {f"step_{step}" for step in saved}
    assert all(read_whole(tmp_path / "checkpoints" / name) for name in names)


def save_beside(folder, without_room):
    """As the loop does: save beside training, look at the outcome in the next step, and agree on a request to stop."""

    def after_step(checkpoints, step, rank):
        background = checkpoints._saves.background
        if rank == 1 and step % 2 == 0:
            while background.is_pending and not background.is_done:
                time.sleep(0.001)
            limit_files(4096 if step in without_room else UNLIMITED[0])
        time.sleep(0.05 * rank)  # the ranks look at different moments
        failing = torch.tensor(float(checkpoints.have_failed()))
        dist.all_reduce(failing)
        checkpoints.after_step(step, stopping=bool(failing))

    return save_in_turn(folder, CHANGES, after_step)


@pytest.mark.parametrize(
    "without_room, saved, failed, ends",
    [
        pytest.param({4}, [2, 6, 8], [4], (), id="once"),
        pytest.param({4, 6}, [2], [4, 6], (7, 8), id="twice_in_a_row"),
        *([pytest.param({8}, [2, 4, 6], [8], (8,), id="the_last")] if FULL else []),
    ],
)
def test_a_failed_save_beside_training_is_told_and_ends_all_ranks_at_one_step(
    tmp_path, run_ranks, without_room, saved, failed, ends
):
    results = run_ranks(2, save_beside, tmp_path, without_room)
    assert [result[1] for result in results] == [failed] * 2
    assert results[0][2] == results[1][2]  # all ranks end alike
    assert results[0][2] in [(step, 3) for step in ends] if ends else results[0][2] is None
    lines = results[0][0].splitlines()
    assert results[1][0] == "" and len(lines) == len(failed) - bool(ends)
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {f"step_{step}" for step in saved}
    assert all(read_whole(tmp_path / "checkpoints" / name) for name in names)
    facts = results[0][3]
    assert facts["saves"] == len(saved) and facts["save_pause_median_s"] > 0 and facts["failed_saves"] == len(failed)
