"""Fixtures of the whole suite. Helpers are imported by name: `from tests.pool import run_ranks`."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: ranks share few cores
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import pytest

from tests.pool import run_ranks as _run_ranks


@pytest.fixture
def run_ranks():
    """`run_ranks(world, function, *args, timeout=60)` of `tests.pool`: real gloo ranks, results by rank."""
    return _run_ranks
