"""`doctor --hosts` over three hosts, of which one has a slow network."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest

from tests.hosts.jobs import Job, environ
from tests.hosts.network import Network, missing

pytestmark = pytest.mark.hosts


def test_the_slow_host_is_named(tmp_path):
    if (reason := missing()) or shutil.which("tc") is None:
        pytest.skip(reason or "no tc here (iproute2)")
    network = Network(Path(tempfile.mkdtemp(prefix="parallelrun-hosts-")), ("worker-1", "worker-2", "worker-3"))
    try:
        network.start()
        network.check(
            "worker-3",
            *[
                "tc",
                "qdisc",
                "add",
                "dev",
                "eth0",
                "root",
                "tbf",
                "rate",
                "200mbit",
                "burst",
                "256kb",
                "latency",
                "50ms",
            ],
        )
        words = ["-m", "parallelrun", "doctor", "--hosts"]
        hosts = network.names
        place = {"WORLD_SIZE": "3", "LOCAL_RANK": "0", "MASTER_ADDR": network.address(hosts[0]), "MASTER_PORT": "29500"}
        job = Job(tmp_path, [
            network.popen(name, "python", *words, output=tmp_path / "output", env=environ(RANK=str(rank), **place))
            for rank, name in enumerate(hosts)
        ])  # fmt: skip
        assert job.wait() == [0, 0, 0], job.output
        assert "slow: worker-3 with every other host, 0." in job.output and "its interface: eth0" in job.output
        assert job.output.count("slow:") == 1, job.output
    finally:
        network.stop()
        shutil.rmtree(network.folder, ignore_errors=True)
