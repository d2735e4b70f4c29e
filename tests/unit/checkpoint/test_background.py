"""Saves beside training, in one process."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from parallelrun.checkpoint.background import BackgroundWriter
from parallelrun.distributed import torch_private
from parallelrun.distributed.comm import counter
from parallelrun.distributed.mesh import Group
from tests.plans import tiny_plan


@pytest.mark.parametrize("fails", [False, True])
def test_kernels_that_a_saving_thread_may_have_entered_stay(monkeypatch, fails):
    """torch frees those that are removed, so that the thread would run others, or crash."""
    changes = []
    kernels = counter._Kernels()

    def observe(names):
        changes.append("made")
        return lambda: changes.append("gone")

    monkeypatch.setattr(torch_private, "observe", observe)
    monkeypatch.setattr("parallelrun.checkpoint.background.KERNELS", kernels)
    writer = BackgroundWriter(tiny_plan({}), Group("world", (0,), 0, None), torch.device("cpu"), 60.0)
    may_end = threading.Event()

    def write(*_, **__):
        may_end.wait()
        if fails:
            raise OSError("a full disk")

    monkeypatch.setattr("parallelrun.checkpoint.background.write_parts", write)
    writer.start([], Path(), 1, {}, 1)
    for _ in range(2):
        kernels.acquire()  # by an observer of the training, for a while
        kernels.release()
    assert changes == ["made"]
    may_end.set()
    if fails:
        with pytest.raises(OSError, match="a full disk"):
            writer.collect()
    else:
        writer.collect()
    assert changes == ["made", "gone"]
