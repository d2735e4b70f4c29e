"""The thread that carries out all-reduces: order, errors, and an end."""

from __future__ import annotations

import gc
import threading
import time

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from parallelrun.strategies.data.common.allreduce.runtime import Queue


def alive(name: str) -> bool:
    return any(thread.name == name for thread in threading.enumerate())


def test_jobs_are_carried_out_in_order_by_one_other_thread():
    queue, seen = Queue("order"), []
    jobs = [queue.put(lambda n=n: seen.append((n, threading.current_thread().name))) for n in range(20)]
    for job in reversed(jobs):
        job.wait()
    assert seen == [(n, "order") for n in range(20)]


def test_an_error_is_raised_by_the_wait_and_the_next_job_is_carried_out():
    queue, seen = Queue("error"), []

    def fail() -> None:
        raise RuntimeError("the peer is gone")

    failed, after = queue.put(fail), queue.put(lambda: seen.append(1))
    after.wait()
    with pytest.raises(RuntimeError, match="the peer is gone"):
        failed.wait()
    assert seen == [1]


def test_a_job_is_seen_by_the_modes_of_who_put_it():
    class Names(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen.append(func.name())
            return func(*args, **(kwargs or {}))

    queue, tensor = Queue("modes"), torch.zeros(2)
    with Names() as names:
        queue.put(lambda: tensor.add_(1)).wait()
    queue.put(lambda: tensor.mul_(2)).wait()
    assert names.seen == ["aten::add_.Tensor"] and tensor.tolist() == [2.0, 2.0]


def test_the_thread_ends_with_its_queue_and_keeps_nothing():
    queue, name = Queue("the end"), "the end"
    queue.put(lambda: None).wait()
    assert alive(name)
    del queue
    gc.collect()
    deadline = time.monotonic() + 5
    while alive(name) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not alive(name)
