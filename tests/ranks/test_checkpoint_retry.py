"""A save that fails on one rank: all ranks go on, try again, and give up, alike."""

from __future__ import annotations

import resource
import signal
from contextlib import redirect_stdout
from io import StringIO

import pytest
import torch

from parallelrun.config.schema import PrecisionConfig
from parallelrun.context import WorkerContext
from parallelrun.errors import SaveFailed
from parallelrun.train.build import build
from parallelrun.train.checkpointing import Checkpoints
from parallelrun.train.schedules import LossScaler
from tests.checkpoints import read_whole
from tests.plans import tiny_config, tiny_plan

CHANGES = {"dp": 2, "strategy.data.kind": "zero1", "steps": 8, "checkpoint.every": 2, "checkpoint.keep": 9}


def save_along(folder, without_room, stop_at):
    """Reach every step; at those of `without_room` rank 1 may write 4 KiB a file. What was said, told and raised."""
    training = build(tiny_config(CHANGES), tiny_plan(CHANGES), torch.device("cpu"))
    rank, told, said, ended = training.mesh.rank, [], StringIO(), None
    context = WorkerContext(
        rank, 2, rank, torch.device("cpu"), folder, lambda *_: None, lambda: False, told.append, rank == 0
    )
    checkpoints = Checkpoints(training, LossScaler(PrecisionConfig(), scaled=False), context)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    for step in range(1, 9):
        if rank == 1 and step in without_room:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, unlimited[1]))
        try:
            with redirect_stdout(said):
                checkpoints.after_step(step, stopping=step == stop_at)
        except SaveFailed as error:
            ended = (step, error.exit_code)
            break
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    return said.getvalue(), told, ended, checkpoints.facts()["failed_saves"]


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
    assert [result[1:] for result in results] == [(failed, ended, len(failed))] * 2
    said = results[0][0].splitlines()
    assert results[1][0] == "" and len(said) == len(failed) - (ended is not None)  # the last is told as the error
    for step, line in zip(failed, said):
        assert f"step {step} could not be written" in line and f"the next save is at step {step + 2}" in line
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {f"step_{step}" for step in saved}
    assert all(read_whole(tmp_path / "checkpoints" / name) for name in names)
