"""What ranks that save or load together tell one another: values as JSON, and what one of them has raised."""

from __future__ import annotations

import errno
from typing import Any

import pytest
import torch.distributed as dist

from parallelrun.base.errors import (
    CheckpointError,
    EnvironmentProblem,
    ParallelrunError,
    PeerFailed,
    Problem,
    SaveFailed,
)
from parallelrun.checkpoint.together import CheckpointRanks

FULL_DISK = OSError(errno.ENOSPC, "No space left on device", "step_3")
TORN = CheckpointError(Problem("rank_1.safetensors is torn", "step_3", command="parallelrun resume=step_2"))
WRAPPED = "wrapped"  # an exception loses its cause on the way to another process


def agree(failing: int | str | None, error: BaseException | str, saving: bool = True) -> Any:
    """What each rank's `agree` returns or raises, if one rank's part, or the decision, raises `error`."""
    rank = dist.get_rank()
    if isinstance(error, str):
        error = RuntimeError("cannot write")
        error.__cause__ = FULL_DISK

    def do() -> list[int]:
        if failing == rank:
            raise error
        return [rank] * (rank + 1)  # of another length on each rank

    def decide(values: Any) -> Any:
        if failing == "decide":
            raise error
        return {"all": [*values]}

    try:
        return CheckpointRanks("it failed", saving).agree(do, decide)
    except ParallelrunError as failed:
        return type(failed), str(failed), failed.exit_code, failed.of_another_rank
    except BaseException as failed:
        return type(failed), str(failed)


def test_the_first_rank_decides_of_all_values(run_ranks):
    assert run_ranks(3, agree, None, FULL_DISK) == [{"all": [[0], [1, 1], [2, 2, 2]]}] * 3


@pytest.mark.parametrize("error", [FULL_DISK, TORN, EnvironmentProblem(Problem("no")), WRAPPED], ids=str)
@pytest.mark.parametrize("failing", [0, 1, "decide"])
@pytest.mark.parametrize("saving", [True, False], ids=["save", "load"])
def test_all_ranks_raise_what_one_of_them_has_met(run_ranks, saving, failing, error):
    culprit = 0 if failing == "decide" else failing
    disk = SaveFailed if saving else CheckpointError
    for rank, (kind, text, code, is_of_another) in enumerate(run_ranks(2, agree, failing, error, saving)):
        assert is_of_another == (rank != culprit)
        if isinstance(error, ParallelrunError):
            assert (kind, text, code) == (type(error), str(error), error.exit_code)
        else:
            assert kind is disk and f"it failed: rank {culprit}: No space left on device: step_3" in text


@pytest.mark.parametrize("failing", [0, 1, "decide"])
def test_an_unknown_exception_stays_on_its_rank(run_ranks, failing):
    culprit = 0 if failing == "decide" else failing
    for rank, raised in enumerate(run_ranks(2, agree, failing, ValueError("odd"))):
        if rank == culprit:
            assert raised == (ValueError, "odd")
        else:
            assert raised[0] is PeerFailed and f"it failed: rank {culprit}: ValueError: odd" in raised[1]


def test_an_interrupt_ends_all_ranks(run_ranks):
    assert run_ranks(2, agree, 1, KeyboardInterrupt()) == [(KeyboardInterrupt, "")] * 2
    assert run_ranks(2, agree, 1, SystemExit(3)) == [(SystemExit, "3")] * 2
