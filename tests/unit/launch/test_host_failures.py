"""Which rank and host is blamed when ranks on several hosts fail, as their launcher sees it."""

from __future__ import annotations

import pytest

from parallelrun.launch import failure
from parallelrun.launch.failure import CAUSE, LOST_PEER, Failure
from parallelrun.launch.host_failures import Exit, LostHost, cause
from tests.plans import tiny_plan

LOST_B = LostHost("b", 2, "ranks 2 to 3", time_ns=50)


def written(tmp_path, rank: int, order: int, what: str) -> None:
    """The clock of the rank's host says that it was the first."""
    failure.write(tmp_path, Failure(rank, what, 6, time_ns=1, order=order, host="its own name"))


@pytest.mark.parametrize(
    ("exits", "lost", "rank", "host", "what"),
    [
        # a victim on the other host was heard of before the rank that was killed
        ([Exit(0, 6, host="a", time_ns=10), Exit(3, -9, host="b", time_ns=20)], [], 3, "b", "died: SIGKILL"),
        ([Exit(3, -9, True, host="b")], [], 3, "b", "died: SIGKILL (the out-of-memory killer)"),
        ([Exit(0, 6, host="a", time_ns=90)], [LOST_B], 2, "b", "the connection to host b (ranks 2 to 3) was lost"),
        # that rank raised before the other host was lost
        ([Exit(1, 6, host="a", time_ns=40)], [LOST_B], 1, "a", "ValueError: mine"),
        ([Exit(2, 3, host="b")], [], 2, "b", "exit 3 without an exception"),
    ],
)
def test_the_cause_is_told_from_its_victims(tmp_path, exits, lost, rank, host, what):
    written(tmp_path, 0, LOST_PEER, "lost its peers")
    written(tmp_path, 1, CAUSE, "ValueError: mine")
    written(tmp_path, 3, LOST_PEER, "of a rank that was killed while it wrote")
    (tmp_path / "metrics.jsonl").write_text('{"step": 7}\n')
    found = cause(tmp_path, exits, lost)
    assert found is not None and (found.rank, found.host) == (rank, host) and found.what.startswith(what)
    assert found.memory == (len(exits) == 1 and exits[0].memory)
    assert found.step == (7 if exits[-1].rank in (2, 3) else 0)


def test_the_message_about_a_lost_host_does_not_begin_with_one_of_its_ranks():
    first, *_ = failure.headline(LOST_B.failure, tiny_plan({"dp": 4}))
    assert first == "error: the connection to host b (ranks 2 to 3) was lost"


def test_ranks_that_were_asked_to_stop_have_not_failed(tmp_path):
    assert cause(tmp_path, [Exit(0, 75), Exit(1, 75)], []) is None
