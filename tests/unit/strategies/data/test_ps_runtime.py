"""The torch-free parts of the parameter server's runtime: clock table, meetings, apply log, figures."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallelrun.strategies.data.ps import log
from parallelrun.strategies.data.ps.clocks import Clocks
from parallelrun.strategies.data.ps.figures import Figures
from parallelrun.strategies.data.ps.log import Applied, Dropped, LogReader, Push, ServerLog
from parallelrun.strategies.data.ps.meeting import Meeting
from parallelrun.strategies.data.ps.shards import assign
from tests.ranks.ps_body import ps_plan


def clocks(*completed: int) -> Clocks:
    return Clocks(dict(enumerate(completed)))


@pytest.mark.parametrize(
    ("completed", "staleness", "may"),
    [((1, 0), 0, False), ((1, 1), 0, True), ((3, 1), 2, True), ((4, 1), 2, False), ((9, 0), None, True)],
)
def test_a_worker_reads_when_the_slowest_is_within_the_bound(completed, staleness, may) -> None:
    assert clocks(*completed).may_read(0, staleness) is may


def test_who_is_through_or_lost_holds_nobody_back() -> None:
    table = clocks(5, 0, 1)
    assert not table.may_read(0, 2) and table.gap == 5
    table.finish(1)
    assert not table.may_read(0, 2) and table.gap == 4
    table.lose(2)
    assert table.may_read(0, 2) and table.slowest == 5
    assert (table.live, table.running) == ({0, 1}, {0})
    table.finish(0)
    assert table.slowest is None and table.gap == 0 and table.may_read(0, 0)


def test_clocks_never_go_back() -> None:
    with pytest.raises(AssertionError, match="pushed clock 2 after 2"):
        clocks(2).tick(0, 2)


@given(st.lists(st.integers(0, 3), max_size=200), st.integers(0, 4))
def test_whatever_the_order_nobody_ends_a_clock_more_than_the_bound_and_one_ahead(order, staleness) -> None:
    """Workers push whenever the table lets them: at completion the gap is at most s + 1 (reference, section 7)."""
    table, blocked = clocks(0, 0, 0, 0), set()
    for worker in order:
        if worker not in blocked:
            table.tick(worker, table.completed[worker] + 1)
            assert table.gap <= staleness + 1
        blocked = {w for w in range(4) if not table.may_read(w, staleness)}
        assert blocked != {0, 1, 2, 3}, "a deadlock"


def test_a_meeting_is_held_once_when_all_have_come() -> None:
    meeting = Meeting()
    meeting.come(0, last=False)
    assert not meeting.complete({0, 1}) and meeting.answer(0) == 0 and meeting.is_waiting(0)
    meeting.come(0, last=False)  # asks again
    meeting.come(1, last=True)
    assert meeting.complete({0, 1}) and meeting.last
    meeting.hold(True)
    assert not meeting.is_waiting(0) and not meeting.last
    meeting.come(0, last=False)  # late to hear of it: that is no new meeting
    assert (meeting.answer(0), meeting.answer(1)) == (1, 1) and not meeting.complete({0})
    meeting.come(0, last=False)
    assert meeting.is_waiting(0) and meeting.answer(0) == 0


def test_a_failed_meeting_says_so_and_a_lost_worker_is_not_waited_for() -> None:
    meeting = Meeting()
    meeting.come(0, last=False)
    assert meeting.complete({0})
    meeting.hold(False)
    assert meeting.answer(0) == -1
    assert not meeting.complete(set()), "nobody has come"


def applied(version: int, worker: int, pulled: int, **more) -> Applied:
    push = Push(worker, version, pulled, loss=1.5, num_valid=8.0, norm=0.25)
    return Applied(0, version, version, (push,), lr=0.1, loss=1.5, norm=0.25, **more)


def test_the_log_gives_back_what_was_written_and_follows_what_grows(tmp_path) -> None:
    writer, reader = ServerLog(tmp_path), LogReader(tmp_path)
    assert reader.new() == []
    rows = [applied(1, 0, 0, time_s=0.1), Dropped(1, 2, 3, 4, 5, 0.2)]
    writer.add(rows[0])
    assert reader.new() == rows[:1]
    writer.add(rows[1])
    with open(tmp_path / log.NAME, "a") as file:
        file.write('{"kind": "upd')  # another server is writing
    assert reader.new() == rows[1:] and reader.new() == []
    assert log.read(tmp_path) == rows


def test_what_is_not_finite_comes_back_as_nan(tmp_path) -> None:
    push = Push(0, 1, 0, float("nan"), 8.0)
    ServerLog(tmp_path).add(Applied(0, 1, 1, (push,), 0.1, float("nan"), float("inf"), applied=False))
    (row,) = log.read(tmp_path)
    assert row.loss != row.loss and row.norm != row.norm and row.pushes[0].loss != row.pushes[0].loss


def test_figures_add_up_the_first_servers_rows() -> None:
    figures = Figures()
    for row in (
        applied(1, 0, 0, queue=0, time_s=1.0),
        applied(2, 1, 0, queue=1, gap=2, time_s=2.0),
        applied(3, 0, 1, queue=1, time_s=4.0),
        applied(4, 1, 3, applied=False, time_s=4.0),
        Dropped(0, 2, 1, 0, 4),
        Dropped(1, 2, 1, 0, 4),  # the second server's: the same push
    ):
        figures.add(row)
    found = figures.document()
    assert found["staleness"] == {0: 2, 1: 2}
    assert (found["staleness_mean"], found["staleness_max"], found["clock_gap_max"]) == (0.5, 1, 2)
    assert found["staleness_mean_of_worker"] == {0: 0.5, 1: 0.5}
    assert (found["updates"], found["skipped_updates"], found["updates_per_s"]) == (3, 1, 0.75)
    assert found["dropped_of_worker"] == {2: 1} and found["dropped_gradients"] == 1
    assert found["server_queue"] == {0: 2, 1: 2}


@pytest.mark.parametrize("servers", [2, 3, 5, 7])
@pytest.mark.parametrize("min_kb", [0.1, 1, 4])
def test_a_server_holds_at_most_one_part_of_a_tensor(servers, min_kb) -> None:
    """A checkpoint file has one entry a tensor."""
    plan = ps_plan({"strategy.data.servers": servers, "strategy.data.shard_min_kb": min_kb, "model.hidden": 32})
    held = [(shard.server, shard.name) for shard in assign(plan)]
    assert len(set(held)) == len(held)
