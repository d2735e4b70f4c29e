"""When each action of a schedule ran: measured by a clock that the test moves, and put together over ranks."""

from __future__ import annotations

import socket

import pytest

from parallelrun.training.metrics.schedule_actions import ActionClock, schedule_document
from parallelrun.training.metrics.timing import HostClock


class GivenClock(HostClock):
    """Its moments are those of a list."""

    def __init__(self, moments):
        self.moments = iter(moments)

    def mark(self):
        return next(self.moments)


def test_actions_have_seconds_since_the_begin_of_their_step():
    clock = ActionClock(GivenClock([1.0, 1.5, 2.0, 10.0, 10.5, 11.0, 12.0, 15.0]))
    assert clock.record() == {}
    for names in ((("F", 0),), (("F", 0), ("B", 1))):
        clock.begin_step()
        for kind, microbatch in names:
            with clock.action(kind, 3, microbatch):
                pass
    record = clock.record()
    assert record["actions"] == [["F", 3, 0, 0.5, 1.0], ["B", 3, 1, 2.0, 5.0]]
    assert record["host"] == socket.gethostname()


def test_an_action_that_fails_is_not_recorded():
    clock = ActionClock(HostClock())
    clock.begin_step()
    with pytest.raises(ValueError), clock.action("F", 0, 0):
        raise ValueError
    assert clock.record() == {}


def test_ranks_of_a_host_have_its_clock_and_hosts_begin_together():
    action = [["F", 0, 0, 0.0, 1.0]]
    hosts = [("a", 5.0), ("a", 5.5), ("b", 100.0), ("b", 99.0)]
    records = [{"host": host, "began": began, "actions": action} for host, began in hosts]
    document = schedule_document(8, records)
    assert document["step"] == 8 and [row["pp"] for row in document["ranks"]] == [0, 1, 2, 3]
    assert [row["actions"][0]["begin_s"] for row in document["ranks"]] == [0.0, 0.5, 1.0, 0.0]
    assert document["ranks"][1]["actions"][0] == {
        "kind": "F", "stage": 0, "microbatch": 0, "begin_s": 0.5, "end_s": 1.5}  # fmt: skip
