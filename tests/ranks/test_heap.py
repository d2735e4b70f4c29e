"""A rank on CPU keeps the memory of large tensors that it frees: every page of new memory costs a fault."""

from __future__ import annotations

import resource
from unittest import mock

import torch

from parallelrun.training.loop import malloc
from tests.pool import run_ranks

NUM_BYTES, TIMES = 34 * 2**20, 4  # above the largest size that glibc keeps by itself
FIRST = 10  # aligned allocations leave a few bytes behind each, until glibc's cache of small blocks is full


def faults() -> int:
    """Pages of memory that was new to this process, over some tensors that were allocated, filled and freed."""
    malloc.keep_freed_memory()
    for number in range(FIRST):
        torch.empty(NUM_BYTES, dtype=torch.uint8).fill_(number)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for number in range(TIMES):
        torch.empty(NUM_BYTES, dtype=torch.uint8).fill_(number)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_large_tensors_are_allocated_from_memory_that_is_there() -> None:
    (found,) = run_ranks(1, faults)
    assert found < TIMES * NUM_BYTES // resource.getpagesize() // 10


def test_the_users_settings_stay() -> None:
    with mock.patch.dict("os.environ", {"MALLOC_TRIM_THRESHOLD_": "131072"}):
        assert not malloc.keep_freed_memory()
