"""A sequence of 16,384 tokens trains on four ranks under a limit of memory that one rank exceeds."""

from __future__ import annotations

import math
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from parallelrun.planner.resolve.resolve_config import resolve
from parallelrun.training.loop.build import build
from parallelrun.training.loop.schedules import LossScaler
from parallelrun.training.loop.step import train_step
from tests.plans import tiny_config
from tests.pool import RanksFailed, run_ranks

MIB = 2**20
MORE = 1000 * MIB  # address space of a rank beyond what it has before it builds the model
LONG = {
    "model.seq": 16384, "model.hidden": 16, "model.heads": 1, "model.layers": 1, "model.vocab": 8192,
    "dataset.vocab": 8192, "dataset.samples": 4, "global_batch": 1, "model.tied_embeddings": False,
    "model.position": "rope",
}  # fmt: skip


@contextmanager
def limited(more: int) -> Iterator[None]:
    """`ulimit -v` for this process: `more` bytes beyond what it has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def train(cp):
    """The loss of a step under the limit."""
    torch.set_num_threads(1)
    config = tiny_config({**LONG, "cp": cp})
    with limited(MORE):
        training = build(config, resolve(config), torch.device("cpu"))
        return train_step(training, 1, 0.01, LossScaler(config.precision, scaled=False)).loss


@pytest.mark.slow
def test_four_ranks_hold_what_one_cannot():
    with pytest.raises(RanksFailed, match=r"(?i)alloc.* memory"):
        run_ranks(1, train, 1)
    losses = run_ranks(4, train, 4, timeout=200.0)
    assert losses == pytest.approx([math.log(LONG["model.vocab"])] * 4, rel=0.05)
