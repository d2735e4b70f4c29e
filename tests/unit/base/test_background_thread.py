"""The thread runs functions in order, hands on what they raise, and ends with its owner."""

from __future__ import annotations

import gc
import threading
import time

import pytest

from parallelrun.base.background_thread import BackgroundThread


def is_running(name: str) -> bool:
    return any(thread.name == name for thread in threading.enumerate())


def test_functions_run_in_order_and_an_exception_reaches_who_waits():
    thread, seen = BackgroundThread("in order"), []
    ends = [thread.run(lambda number=number: seen.append(number)) for number in range(3)]
    failed = thread.run(lambda: 1 // 0)
    thread.run(lambda: seen.append(3)).result(5)
    assert seen == [0, 1, 2, 3] and all(end.done() for end in ends)
    with pytest.raises(ZeroDivisionError):
        failed.result(5)


def test_the_thread_ends_with_its_owner_and_keeps_nothing():
    thread, name = BackgroundThread("the end"), "the end"
    thread.run(lambda: None).result(5)
    assert is_running(name)
    del thread
    gc.collect()
    deadline = time.monotonic() + 5
    while is_running(name) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_running(name)
