"""The hosts of `emulate=true`: what is emulated, where it is refused, and the namespaces themselves (as root)."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from parallelrun.base.errors import ConfigError, EnvironmentProblem
from parallelrun.config.schema.run_schema import Config
from parallelrun.launch.host import emulation
from parallelrun.launch.host.emulation import EmulatedNetwork, Namespaces
from parallelrun.planner.resolve.resolve_config import resolve
from tests.namespaces import needs_namespaces
from tests.plans import tiny_config

ON_25G = {"cluster.name": "ethernet_25g", "cluster.gpus_per_node": 1, "cluster.inter_gb_s": 3.125,
          "cluster.latency_us": 30.0, "emulate": True}  # fmt: skip


def network(can_delay: bool = True, **more: object) -> EmulatedNetwork:
    config = tiny_config({**ON_25G, "dp": 4, **more})
    return emulation.network_of(config, resolve(config), can_delay)


def test_ports_have_the_clusters_rate_and_delay_slowed_down_until_this_machine_carries_all_of_them():
    found = network()
    assert (found.num_hosts, found.ranks_per_host, found.slowdown) == (4, 1, 50)  # 4 x 3.125 GB/s over 0.5 GB/s: 25
    assert (found.bytes_s, found.delay_s) == pytest.approx((3.125e9 / 50, 50 * 30e-6))
    assert network(emulate_slowdown=1.5).bytes_s == 3.125e9 / 1.5
    slow = network(**{"cluster.inter_gb_s": 0.1})
    assert (slow.slowdown, slow.bytes_s) == (1, 0.1e9)


def test_ranks_of_a_host_share_its_ports():
    found = network(**{"cluster.gpus_per_node": 2, "cluster.inter_gb_s": 0.1})
    assert (found.num_hosts, found.ranks_per_host, found.bytes_s) == (2, 2, 0.2e9)
    assert [found.host_of(rank) for rank in range(4)] == [0, 0, 1, 1]


def test_the_prediction_for_an_emulated_network_is_that_of_its_own_rate_and_delay():
    config: Config = tiny_config({**ON_25G, "dp": 4})
    cluster = network().cluster(config.cluster)
    assert (cluster.inter_gb_s, cluster.latency_us) == pytest.approx((0.0625, 1500))
    assert network(can_delay=False).cluster(config.cluster).latency_us == 0


def test_the_note_says_what_is_emulated_and_what_is_not():
    assert network().note("ethernet_25g") == (
        "emulated network: 4 hosts of 1 rank, ports of 62.5 MB/s and 1500 us, 50 times slower than cluster=ethernet_25g"
    )
    assert "no delay (this kernel has no netem)" in network(can_delay=False).note("ethernet_25g")


@pytest.mark.parametrize(
    ("keys", "where"),
    [
        ({"emulate": True}, {"cluster.inter_gb_s", "cluster.gpus_per_node"}),
        ({"emulate_slowdown": 10.0}, {"emulate_slowdown"}),
    ],
)
def test_hosts_of_which_too_little_is_known_are_refused(keys, where):
    with pytest.raises(ConfigError) as caught:
        resolve(tiny_config({"dp": 4, **keys}))
    assert {problem.where for problem in caught.value.problems} == where


def test_gpus_are_refused():
    config = tiny_config({**ON_25G, "dp": 4})
    with pytest.raises(ConfigError, match="runs CPU ranks"):
        emulation.check(config, replace(resolve(config), device="cuda"))


@pytest.mark.parametrize(
    ("prepare", "what"),
    [
        (lambda patch: patch.setattr(os, "geteuid", lambda: 1000), "only root"),
        (lambda patch: patch.setattr(emulation.shutil, "which", lambda name, path: None), "ip and tc of iproute2"),
    ],
)
def test_a_machine_that_cannot_emulate_hosts_says_why(monkeypatch, prepare, what):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    prepare(monkeypatch)
    config = tiny_config({**ON_25G, "dp": 4})
    with pytest.raises(EnvironmentProblem, match=what):
        emulation.check(config, resolve(config))


@needs_namespaces
def test_hosts_have_names_and_addresses_and_reach_each_other_at_the_ports_rate():
    descriptors, interfaces = len(os.listdir("/proc/self/fd")), socket.if_nameindex()
    hosts = Namespaces(EmulatedNetwork(2, 1, 10e6, None, 1))
    try:
        listener = on_host(hosts, 0, lambda: socket.create_server((emulation.address_of(0), 0)))
        sent = bytes(2_000_000)
        sender = threading.Thread(target=on_host, args=(hosts, 1, lambda: _send(listener.getsockname(), sent)))
        begin = time.monotonic()
        sender.start()
        assert _received(listener) == len(sent)
        sender.join()
        assert time.monotonic() - begin > 0.75 * len(sent) / 10e6  # loopback takes a hundredth of that
        assert [name for _, name in on_host(hosts, 1, socket.if_nameindex)] == ["lo", emulation.INTERFACE]
        with pytest.raises(OSError):
            socket.create_connection(listener.getsockname(), timeout=0.2)  # from outside
    finally:
        listener.close()
        hosts.close()
    assert (len(os.listdir("/proc/self/fd")), socket.if_nameindex()) == (descriptors, interfaces)


def on_host(hosts: Namespaces, rank: int, action: Callable[[], Any]) -> Any:
    """What `action` returns on the host of a rank."""

    def run() -> Any:
        hosts.enter(rank)
        return action()

    return emulation.in_thread(run)


def _send(address: tuple[str, int], data: bytes) -> None:
    with socket.create_connection(address) as connection:
        connection.sendall(data)


def _received(listener: socket.socket) -> int:
    connection, _ = listener.accept()
    with connection:
        return sum(map(len, iter(lambda: connection.recv(2**20), b"")))
