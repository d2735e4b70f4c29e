"""The single-process parts of the parameter server's runtime: clock table, barriers, apply log, statistics."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallelrun.strategies.data.ps import apply_log
from parallelrun.strategies.data.ps.apply_log import AppliedUpdate, ApplyLogReader, DroppedPush, LogStatistics, Push
from parallelrun.strategies.data.ps.connections import PeerLost, WorkerConnections
from parallelrun.strategies.data.ps.protocol import Ask, ServerReply, WorkerRequest
from parallelrun.strategies.data.ps.server import Server
from parallelrun.strategies.data.ps.synchronization import Barrier, WorkerClocks


def clocks(*completed: int) -> WorkerClocks:
    return WorkerClocks(dict(enumerate(completed)))


@pytest.mark.parametrize(
    ("completed", "staleness", "may"),
    [((1, 0), 0, False), ((1, 1), 0, True), ((3, 1), 2, True), ((4, 1), 2, False), ((9, 0), None, True)],
)
def test_a_worker_reads_when_the_slowest_is_within_the_bound(completed, staleness, may) -> None:
    assert clocks(*completed).may_read(0, staleness) is may


def test_a_finished_or_lost_worker_holds_nobody_back() -> None:
    table = clocks(5, 0, 1)
    assert not table.may_read(0, 2) and table.gap == 5
    table.finished.add(1)
    assert not table.may_read(0, 2) and table.gap == 4
    table.lost.add(2)
    assert table.may_read(0, 2) and table.slowest == 5
    assert (table.live, table.running) == ({0, 1}, {0})
    table.finished.add(0)
    assert table.slowest is None and table.gap == 0 and table.may_read(0, 0)


@given(st.lists(st.integers(0, 3), max_size=200), st.integers(0, 4))
def test_in_any_order_the_clock_gap_is_at_most_the_bound_plus_one(order, staleness) -> None:
    """Workers push whenever the table lets them: at completion the gap is at most s + 1."""
    table, blocked = clocks(0, 0, 0, 0), set()
    for worker in order:
        if worker not in blocked:
            table.tick(worker, table.completed[worker] + 1)
            assert table.gap <= staleness + 1
        blocked = {w for w in range(4) if not table.may_read(w, staleness)}
        assert blocked != {0, 1, 2, 3}, "a deadlock"


def test_a_barrier_is_released_when_all_have_arrived_and_is_reusable() -> None:
    barrier = Barrier()
    barrier.arrive(0, final=False)
    assert not barrier.is_complete({0, 1}) and barrier.waiting == {0}
    barrier.arrive(1, final=True)
    assert barrier.is_complete({0, 1}) and barrier.final
    barrier.release(0)
    assert not barrier.waiting and not barrier.final and not barrier.failed_step
    barrier.arrive(0, final=False)
    assert barrier.waiting == {0} and not barrier.is_complete({0, 1}) and not barrier.final


def test_a_failed_action_is_reported_and_a_lost_worker_is_not_waited_for() -> None:
    barrier = Barrier()
    barrier.arrive(0, final=False)
    assert barrier.is_complete({0})
    barrier.release(4)
    assert barrier.failed_step == 4
    assert not barrier.is_complete(set()), "nobody has arrived"


class Rank:
    """The server's end of a rank's connection, which counts how often it took the weights."""

    def __init__(self, rank: int, worker: int):
        self.rank, self.worker, self.copies = rank, worker, 0

    def copy_weights(self, is_fixed: bool) -> None:
        self.copies += 1


def test_the_ranks_of_a_worker_make_one_request_and_get_weights_of_one_version() -> None:
    ranks = [Rank(0, 0), Rank(1, 0), Rank(2, 1)]
    worker = WorkerConnections(0, ranks)
    worker.requests[1] = WorkerRequest(Ask.UPDATE, 3, 5, 0.0, 0.0, 0.5, stop=1.0, step_time_s=0.2)
    assert worker.request() is None, "the other rank has not asked yet"
    worker.requests[0] = WorkerRequest(Ask.UPDATE, 3, 5, 2.0, 4.0, 0.5, stop=0.0, step_time_s=0.1)
    assert worker.request() == WorkerRequest(Ask.UPDATE, 3, 5, 2.0, 4.0, 0.5, stop=1.0, step_time_s=0.2)
    assert not worker.requests and worker.turn == 0
    worker.done(ServerReply(version=6), is_fixed=False)
    assert (worker.turn, worker.reply.version, [rank.copies for rank in ranks]) == (1, 6, [1, 1, 0])
    worker.requests |= {0: WorkerRequest(Ask.UPDATE, 4, 6), 1: WorkerRequest(Ask.UPDATE, 4, 5)}
    with pytest.raises(AssertionError, match="ranks of one worker differ"):
        worker.request()


def test_a_rank_whose_request_waits_for_a_lost_rank_of_its_worker_is_lost_too() -> None:
    server, ranks, lost = Server.__new__(Server), [Rank(0, 0), Rank(1, 0)], []
    server._changed, server._error, server._clocks = threading.Condition(), None, clocks(0)
    server._workers = [WorkerConnections(0, ranks)]

    def ask() -> None:
        with pytest.raises(PeerLost, match="another rank of the worker of rank 0"):
            server._do_once(ranks[0], WorkerRequest(), server._read)
        lost.append(0)

    waiting = threading.Thread(target=ask, daemon=True)
    waiting.start()
    with server._changed:
        server._clocks.lost.add(0)
        server._changed.notify_all()
    waiting.join(10)
    assert lost == [0]


def applied(version: int, worker: int, pulled: int, **more) -> AppliedUpdate:
    push = Push(worker, version, pulled, loss=1.5, num_valid=8.0, norm=0.25)
    return AppliedUpdate(0, version, version, (push,), lr=0.1, loss=1.5, norm=0.25, **more)


def test_the_log_gives_back_what_was_written_and_follows_what_grows(tmp_path) -> None:
    reader = ApplyLogReader(tmp_path)
    assert reader.new_rows() == []
    rows = [applied(1, 0, 0, time_s=0.1), DroppedPush(1, 2, 3, 4, 5, 0.2)]
    apply_log.append_row(tmp_path, rows[0])
    assert reader.new_rows() == rows[:1]
    apply_log.append_row(tmp_path, rows[1])
    with open(tmp_path / apply_log.NAME, "a") as file:
        file.write('{"kind": "upd')  # another server is writing
    assert reader.new_rows() == rows[1:] and reader.new_rows() == []
    assert apply_log.read_log(tmp_path) == rows


def test_a_non_finite_number_is_read_as_nan(tmp_path) -> None:
    push = Push(0, 1, 0, float("nan"), 8.0)
    apply_log.append_row(tmp_path, AppliedUpdate(0, 1, 1, (push,), 0.1, float("nan"), float("inf"), applied=False))
    (row,) = apply_log.read_log(tmp_path)
    assert row.loss != row.loss and row.norm != row.norm and row.pushes[0].loss != row.pushes[0].loss


def test_statistics_of_a_servers_rows() -> None:
    statistics = LogStatistics()
    for row in (
        applied(1, 0, 0),
        applied(2, 1, 0, gap=2),
        applied(3, 0, 1),
        applied(4, 1, 3, applied=False),
        DroppedPush(0, 2, 1, 0, 4),
    ):
        statistics.add(row)
    found = statistics.document()
    assert found["staleness_of_worker"] == {0: {0: 1, 1: 1}, 1: {0: 1, 1: 1}}
    assert (found["staleness_mean"], found["staleness_max"], found["clock_gap_max"]) == (0.5, 1, 2)
    assert (found["updates"], found["skipped_updates"]) == (3, 1)
    assert found["dropped_of_worker"] == {2: 1} and found["dropped_gradients"] == 1
