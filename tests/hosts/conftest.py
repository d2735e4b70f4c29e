"""The hosts that all tests of this folder share. Run them by `pytest -n 0 -m hosts`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.network import Network, network_of


@pytest.fixture(scope="session")
def network() -> Iterator[Network]:
    with network_of("worker-1", "worker-2") as network:
        yield network


@pytest.fixture(scope="session")
def ssh_config(network: Network) -> Path:
    return network.serve_ssh()


@pytest.fixture(autouse=True)
def _cleared(network: Network) -> Iterator[None]:
    yield
    network.clear()
