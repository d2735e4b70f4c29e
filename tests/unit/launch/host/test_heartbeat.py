"""The memory that the launcher and its ranks share."""

from __future__ import annotations

from parallelrun.launch.host.heartbeat import NOT_RETURNED, HeartbeatFile


def test_the_heartbeat_file_is_shared_through_its_descriptor():
    heartbeats = HeartbeatFile(2)
    other = HeartbeatFile(2, heartbeats.descriptor)
    other.beat(1, 7, "a phase whose name is longer than there is room for")
    assert (heartbeats.read(1).step, heartbeats.read(1).phase) == (7, "a phase whose name is longer tha")
    assert heartbeats.read(0).step == 0 and heartbeats.read(0).age_s < 60
    assert heartbeats.returned(0) == NOT_RETURNED
    other.set_returned(0, 75)
    assert (heartbeats.returned(0), heartbeats.returned(1)) == (75, NOT_RETURNED)
    assert not heartbeats.stop_requested()
    other.request_stop()
    assert heartbeats.stop_requested()
