"""The Slurm that all tests of this folder share. Run them by `pytest -n 0 -m slurm`."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import NODES, SlurmCluster, missing


@pytest.fixture(scope="session")
def shared_slurm() -> Iterator[SlurmCluster]:
    if reason := missing():
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="parallelrun-slurm-"))  # short: munge's socket has a limit
    cluster = SlurmCluster(folder)
    try:
        try:
            cluster.start()
        except AssertionError as error:  # before any test of ours
            pytest.skip(f"Slurm does not start here: {error}")
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def slurm(shared_slurm: SlurmCluster) -> Iterator[SlurmCluster]:
    """The cluster with four idle nodes, and without jobs afterwards."""
    yield shared_slurm
    shared_slurm.run("scancel", "--user=root")
    shared_slurm.restart_lost_nodes()
    shared_slurm.wait_for_nodes(NODES)
