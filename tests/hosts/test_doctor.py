"""`doctor --hosts` over three hosts, of which one has a slow network."""

from __future__ import annotations

import sys

import pytest

from tests.hosts.jobs import PORT, Job, environ
from tests.hosts.network import network_of

pytestmark = pytest.mark.hosts


def test_the_slow_host_is_named(tmp_path):
    with network_of("worker-1", "worker-2", "worker-3") as network:
        limit = "tc qdisc add dev eth0 root tbf rate 200mbit burst 256kb latency 50ms"
        network.check("worker-3", *limit.split())
        first = network.address(network.names[0])
        place = {"WORLD_SIZE": "3", "LOCAL_RANK": "0", "MASTER_ADDR": first, "MASTER_PORT": PORT}
        words = (sys.executable, "-m", "parallelrun", "doctor", "--hosts")
        job = Job(tmp_path, [
            network.popen(name, *words, output=tmp_path / "output", env=environ(RANK=str(rank), **place))
            for rank, name in enumerate(network.names)
        ])  # fmt: skip
        assert job.wait() == [0, 0, 0], job.output
        assert "slow: worker-3 with every other host, 0." in job.output and "its interface: eth0" in job.output
        assert job.output.count("slow:") == 1, job.output
