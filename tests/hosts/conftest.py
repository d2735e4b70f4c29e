"""The hosts that all tests of this folder share. Run them by `pytest -n 0 -m hosts`."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.network import Network, missing


@pytest.fixture(scope="session")
def network() -> Iterator[Network]:
    if reason := missing():
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="parallelrun-hosts-"))
    found = Network(folder)
    try:
        found.start()
        yield found
    finally:
        found.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def ssh_config(network: Network) -> Path:
    if shutil.which("sshd", path="/usr/sbin:/usr/bin:/usr/local/sbin") is None:
        pytest.skip("no sshd here (openssh-server)")
    return network.serve_ssh()


@pytest.fixture(autouse=True)
def _cleared(network: Network) -> Iterator[None]:
    yield
    network.clear()
