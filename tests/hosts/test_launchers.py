"""The same training over two hosts under each launcher: the losses of our own launcher on one host, bit for bit.

The hosts are set up as Debian sets them up: a host's own name means 127.0.1.1 there, which no other host can reach.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.launcher import wait_for
from tests.cli.test_launch_supervisor import listening_addresses
from tests.hosts.jobs import PATIENCE_S, PORT, Job, by_mpirun, by_torchrun, environ, ranks, variable
from tests.hosts.network import Network
from tests.matrix import FULL

pytestmark = pytest.mark.hosts
TINY = (
    "model=gpt", "strategy=ptdp", "dataset=synthetic", "model.layers=2", "model.hidden=16", "model.heads=2",
    "model.seq=8", "eval.batches=1", "global_batch=4", "steps=3", "tp=2", "dp=2",
)  # fmt: skip
PROGRAM = ("-m", "parallelrun", *TINY)


def losses(folder: Path) -> list[float]:
    (file,) = [path for path in folder.glob("runs/*/*/metrics.jsonl") if not path.parent.parent.is_symlink()]
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> list[float]:
    """The losses of one host."""
    folder = tmp_path_factory.mktemp("one host")
    subprocess.run([sys.executable, *PROGRAM, "backend=gloo"], cwd=folder, env=environ(), check=True, timeout=200,
                   capture_output=True)  # fmt: skip
    return losses(folder)


def check(job: Job, expected: list[float], network: Network) -> None:
    assert set(job.wait()) == {0}, job.output
    assert losses(job.folder) == expected
    assert json.loads((job.run / "manifest.json").read_text())["hosts"] == list(network.names)


def nodes(network: Network, folder: Path, variables: dict[str, object]) -> Job:
    """The program itself on every node, which has its place from `variables`: a value for each node, or one for all."""
    return Job(folder, [
        network.popen(name, sys.executable, *PROGRAM, output=folder / "output", env=environ(**{
            key: str(value[number] if isinstance(value, list) else value) for key, value in variables.items()
        }))
        for number, name in enumerate(network.names)
    ])  # fmt: skip


def test_torchrun(network, tmp_path, expected):
    check(by_torchrun(network, tmp_path, PROGRAM), expected, network)


def test_mpirun(network, tmp_path, expected, ssh_config):
    if shutil.which("mpirun") is None:
        pytest.skip("no mpirun here (openmpi-bin)")
    job = by_mpirun(network, tmp_path, PROGRAM, ssh_config)
    check(job, expected, network)
    assert "without a token" not in job.output


def test_our_launcher_with_a_hostfile_of_uneven_hosts(network, tmp_path, expected, ssh_config):
    """The ranks are in the hosts' order: rank 0, which serves the others, is on another host than the launcher.

    A folder's name reaches the remote shell: it must not be read by it.
    """
    folder = tmp_path / "it's; touch pwned $(touch pwned)"
    folder.mkdir()
    first, second = network.names
    (folder / "hosts").write_text(f"{network.address(second)} slots=1\n{first}:3\n")
    words = ["--hostfile", "hosts", "--ssh-config", str(ssh_config)]
    job = Job(folder, [
        network.popen(first, sys.executable, *PROGRAM, *words, output=folder / "output", env=environ())
    ])  # fmt: skip
    served = wait_for(lambda: (pids := ranks(network, second)) and listening_addresses(pids), job.output, PATIENCE_S)
    assert served == {"02004D0A"}, "10.77.0.2, as /proc/net/tcp writes it"
    assert [variable(pid, "RANK") for name in (second, first) for pid in ranks(network, name)] == ["0", "1", "2", "3"]
    check(job, expected, network)
    assert f"starting rank 0 on {network.address(second)}, ranks 1 to 3 on {first}" in job.output
    assert re.search(rf"^\[{network.address(second)}\] step 3/3 .*tokens/s$", job.output, re.MULTILINE)
    assert not list(tmp_path.rglob("pwned"))


@pytest.mark.skipif(not FULL, reason="as torchrun's test: with --matrix=full")
def test_the_pods_of_kubeflow_trainer(network, tmp_path, expected):
    variables = {"PET_NNODES": 2, "PET_NPROC_PER_NODE": 2, "PET_NODE_RANK": [0, 1], "PARALLELRUN_TOKEN": "secret",
                 "PET_MASTER_ADDR": network.address(network.names[0]), "PET_MASTER_PORT": PORT}  # fmt: skip
    job = nodes(network, tmp_path, variables)
    check(job, expected, network)
    assert "node 1 of 2 (Kubernetes): starting 2 ranks" in job.output and "without a token" not in job.output


def test_the_nodes_of_skypilot_without_a_token_are_warned(network, tmp_path):
    addresses = "\n".join(map(network.address, network.names))
    variables = {"SKYPILOT_NUM_NODES": 2, "SKYPILOT_NODE_RANK": [0, 1], "SKYPILOT_NODE_IPS": addresses,
                 "PARALLELRUN_TOKEN": ""}  # fmt: skip
    job = nodes(network, tmp_path, {**variables, "SKYPILOT_NUM_GPUS_PER_NODE": 2})
    assert set(job.wait()) == {0}, job.output
    assert f"listens on {network.address(network.names[0])}:29500 without a token" in job.output


def test_an_interface_that_a_host_does_not_have_is_told(network, tmp_path):
    job = by_torchrun(network, tmp_path, PROGRAM, per_host=1, GLOO_SOCKET_IFNAME="ib0")
    assert all(job.wait())
    assert "GLOO_SOCKET_IFNAME=ib0, and this host has only eth0, lo" in job.output
    assert os.listdir(tmp_path) == ["output"]
