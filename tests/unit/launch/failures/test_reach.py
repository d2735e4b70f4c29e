"""What a rank notices by itself: which host is cut off, as every host must say alike, and that its launcher is gone."""

from __future__ import annotations

import io
import os
import socket
from functools import partial
from types import SimpleNamespace

import pytest

from parallelrun.launch.failures import reach, watchdog
from parallelrun.launch.failures.failure import Failure
from parallelrun.launch.failures.reach import RESENT, Reach
from parallelrun.launch.host.environment import Attached
from parallelrun.launch.host.heartbeat import HeartbeatFile
from parallelrun.launch.store.rendezvous import Member


def members(hosts: str) -> list[Member]:
    """A rank for each letter, which is its host."""
    return [
        Member(rank, host, 1, "", {}, {}, "", "", True, addresses=[f"{host}.address", "bridge"])
        for rank, host in enumerate(hosts)
    ]


def lost(monkeypatch, hosts: str, rank: int, silent: str, connected: str = "abcd") -> tuple[str, str, int] | None:
    """What a rank tells when the hosts `silent` do not answer it: host, first rank, ranks."""
    found = Reach(rank, members(hosts))
    others = sorted(set(hosts) - {hosts[rank]})
    numbers = {host: number for number, host in enumerate(others) if host in connected}
    monkeypatch.setattr(found, "_probed", lambda: numbers)
    monkeypatch.setattr(reach, "_resent", lambda number: RESENT if others[number] in silent else RESENT - 1)
    told = found.lost_host()
    return told and (told.what, told.host, told.rank)


@pytest.mark.parametrize(
    ("hosts", "rank", "silent", "expected"),
    [
        ("ab", 0, "", None),
        ("ab", 0, "b", ("b", 1, "rank 1")),
        ("ab", 1, "a", ("b", 1, "rank 1")),  # a tie: the side of rank 0 is right
        ("aabb", 1, "b", ("b", 2, "ranks 2 to 3")),
        ("aabb", 3, "a", ("b", 2, "ranks 2 to 3")),
        ("aabbb", 0, "b", ("a", 0, "ranks 0 to 1")),  # the side of most ranks is right
        ("aabbb", 4, "a", ("a", 0, "ranks 0 to 1")),
        ("abc", 0, "bc", ("a", 0, "rank 0")),
        ("abc", 1, "a", ("a", 0, "rank 0")),
        ("abcd", 1, "cd", ("c", 2, "rank 2")),
        ("abcd", 3, "ab", ("c", 2, "rank 2")),
    ],
)
def test_all_ranks_name_the_same_lost_host(monkeypatch, hosts, rank, silent, expected):
    told = expected and f"the connection to host {expected[0]} ({expected[2]}) was lost: it does not answer"
    assert lost(monkeypatch, hosts, rank, silent) == (expected and (told, *expected[:2]))


def test_a_rank_without_a_connection_to_every_host_does_not_know_the_sides(monkeypatch):
    assert lost(monkeypatch, "abc", 1, "a", connected="a") is None


def test_the_connection_to_another_host_is_found_probed_and_left_to_its_owner(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        accepted, _ = server.accept()
        with accepted:
            found = Reach(0, members("ab"))
            found._host_of = {"127.0.0.1": "b"}
            for _ in range(2):
                assert found.lost_host() is None
                assert found._probed()["b"] in (one.fileno(), accepted.fileno())
            options = [s.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) for s in (one, accepted)]
            assert sorted(map(bool, options)) == [False, True]
            one.sendall(b"x")
            assert accepted.recv(1) == b"x"
            monkeypatch.setattr(reach, "_resent", lambda number: RESENT)
            told = found.lost_host()
            assert told and told.what == "the connection to host b (rank 1) was lost: it does not answer"
    assert found.lost_host() is None, "nothing is connected any more"


def test_addresses_that_all_hosts_have_lead_nowhere():
    assert Reach(0, members("ab"))._host_of == {"b.address": "b"}


def test_a_rank_that_waits_is_ended_by_its_watchdog_and_the_lost_host_is_the_cause(monkeypatch):
    """The watchdog sees nothing for two looks, then the loss."""
    heartbeats, told, codes = HeartbeatFile(1, first_rank=1), [], []
    heartbeats.beat(1, 12, "forward")

    def exit_(code: int) -> None:
        codes.append(code)
        done.looks = 99

    def wait(seconds: float) -> bool:
        done.looks += 1
        return done.looks > 10

    done = SimpleNamespace(looks=0, wait=wait)
    monkeypatch.setattr(watchdog.os, "_exit", exit_)
    lost = Failure(2, "worker-2 does not answer", 6, host="worker-2")
    look = partial(reach.find_loss, lambda: lost if done.looks > 2 else None, None, heartbeats, 1)
    watchdog.Watchdog(heartbeats, 1, 60.0, io.StringIO(), told.append, None, look, told.append, done).watch()
    (cause,) = told
    assert codes == [6] and (cause.rank, cause.host, cause.step) == (2, "worker-2", 12)


def test_a_rank_whose_launcher_is_gone_tells_it():
    heartbeats = HeartbeatFile(1, first_rank=3)
    heartbeats.beat(3, 12, "forward")
    assert reach.find_loss(lambda: None, None, heartbeats, 3) is None
    assert reach.find_loss(lambda: None, os.getppid(), heartbeats, 3) is None
    found = reach.find_loss(lambda: None, 1_000_000_000, heartbeats, 3)
    assert found is not None and (found.rank, found.exit_code, found.step) == (3, 6, 12)
    assert found.what == reach.LAUNCHER_LOST


@pytest.mark.parametrize(
    ("source", "environ", "watched"),
    [
        ("torchrun", {"TORCHELASTIC_RUN_ID": "1"}, True),
        ("torchrun", {}, False),  # set by hand: the shell that did may have exited
        ("mpirun", {}, True),
        ("srun", {}, False),
        ("TF_CONFIG", {}, False),
    ],
)
def test_whose_launcher_is_watched(source, environ, watched):
    attached = Attached(0, 2, 0, "a", 1, source, "job")
    assert reach.launcher(attached, environ) == (os.getppid() if watched else None)


def test_a_rank_that_has_failed_leaves_its_connections_but_not_what_listens(monkeypatch):
    """The kernel shows the other side the end, though this process still has the descriptor."""
    left: list[str] = []
    ours = SimpleNamespace(abort=lambda: left.append("ours"))
    monkeypatch.setattr(
        "parallelrun.distributed.torch_private.process_groups", lambda: [(ours, (0, 1)), ("gloo's", (0, 2))]
    )
    monkeypatch.setattr("parallelrun.distributed.shared_memory.is_ours", lambda group: group is ours)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        accepted, _ = server.accept()
        monkeypatch.setattr(reach.os, "listdir", lambda folder: [str(one.fileno()), str(server.fileno()), "0"])
        with accepted:
            accepted.settimeout(10)
            reach.hang_up()
            assert accepted.recv(1) == b"" and left == ["ours"]
        with socket.create_connection(server.getsockname()):
            server.accept()[0].close()
