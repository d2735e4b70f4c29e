"""What ranks that save or load together tell one another: values as JSON, and what one of them has raised."""

from __future__ import annotations

import errno
from typing import Any

import pytest
import torch.distributed as dist

from parallelrun.base.errors import CheckpointError, EnvironmentProblem, Problem
from parallelrun.checkpoint.together import RanksFailed, _Ranks, words

FULL_DISK = OSError(errno.ENOSPC, "No space left on device", "step_3")
TORN = CheckpointError(Problem("rank_1.safetensors is torn", "step_3", command="parallelrun resume=step_2"))


WRAPPED = "wrapped"  # an exception loses its cause on the way to another process


def facts(error: BaseException) -> tuple[Any, ...]:
    return (
        type(error),
        words(error),
        *(getattr(error, one, None) for one in ("problems", "exit_code", "errno", "filename")),
    )


def agree(failing: int | str | None, error: BaseException | str) -> Any:
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
        return _Ranks(None, alone=False).agree(do, decide)
    except RanksFailed as failed:
        return {one: facts(cause) for one, cause in failed.failures.items()}


def test_the_first_rank_decides_of_all_values(run_ranks):
    assert run_ranks(3, agree, None, FULL_DISK) == [{"all": [[0], [1, 1], [2, 2, 2]]}] * 3


@pytest.mark.parametrize("error", [FULL_DISK, TORN, EnvironmentProblem(Problem("no")), ValueError("odd")], ids=str)
@pytest.mark.parametrize("failing", [0, 1, "decide"])
def test_all_ranks_are_told_who_has_failed_and_why(run_ranks, failing, error):
    culprit = 0 if failing == "decide" else failing
    for rank, found in enumerate(run_ranks(2, agree, failing, error)):
        assert [*found] == [culprit]
        if rank == culprit or not isinstance(error, ValueError):
            assert found[culprit] == facts(error)
        else:
            assert found[culprit][1] == "ValueError: odd", "the words of the rank that has raised it"


@pytest.mark.parametrize("failing", [0, 1, "decide"])
def test_a_full_disk_inside_another_exception_is_told_as_one(run_ranks, failing):
    culprit = 0 if failing == "decide" else failing
    for rank, found in enumerate(run_ranks(2, agree, failing, WRAPPED)):
        assert found[culprit][0] is (RuntimeError if rank == culprit else OSError)
        if rank != culprit:
            assert found[culprit][-2:] == (errno.ENOSPC, "step_3")
