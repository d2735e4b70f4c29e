"""The thread that carries out all-reduces ends with its queue; `tests/ranks/test_allreduce.py` has all else."""

from __future__ import annotations

import gc
import threading
import time

from parallelrun.strategies.data.common.allreduce.runtime import Queue


def is_running(name: str) -> bool:
    return any(thread.name == name for thread in threading.enumerate())


def test_the_thread_ends_with_its_queue_and_keeps_nothing():
    queue, name = Queue("the end"), "the end"
    queue.put(lambda: None).wait()
    assert is_running(name)
    del queue
    gc.collect()
    deadline = time.monotonic() + 5
    while is_running(name) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_running(name)
