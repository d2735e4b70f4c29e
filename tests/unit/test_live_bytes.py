"""`tests.live_bytes` counts what is made inside it, and nothing that was there before; what another thread is about to
free is no part of a peak."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.live_bytes import LiveBytes
from tests.peak_bytes import PeakBytes

OLD = {
    "view": lambda x: x.view(8),
    "slice": lambda x: x[1:],
    "transpose": lambda x: x.t(),
    "in place": lambda x: x.add_(1.0),
    "out": lambda x: torch.add(x, 1.0, out=x),
    "views of a list": lambda x: torch.split(x, 1),
}


@pytest.mark.parametrize("operation", OLD.values(), ids=OLD)
def test_a_storage_that_was_there_before_is_not_counted(operation: Callable[[Tensor], object]) -> None:
    x = torch.ones(2, 4)
    with LiveBytes() as counter:
        kept = operation(x)
        assert (counter.now, counter.peak) == (0, 0), kept


def test_a_storage_made_inside_counts_once_until_it_is_freed() -> None:
    x = torch.ones(2, 4)
    with LiveBytes(smallest=16) as counter:
        made = x + 1.0
        views = made.view(8), made.t(), made.add_(1.0)
        small = made[0, :2].clone()
        assert counter.now == made.nbytes == 32, "views share it, and what is smaller than `smallest` is left out"
        del made, views, small
    assert (counter.now, counter.peak) == (0, 32)


def test_a_peak_waits_for_the_thread_of_a_collective_that_has_ended() -> None:
    """A thread of gloo holds the tensors of a collective until some time after `wait`."""
    matrix, started = torch.ones(400, 400), threading.Event()

    def end(held: list[Tensor]) -> None:
        started.set()
        for _ in range(10):
            matrix.mm(matrix)
        held.clear()

    done: torch.futures.Future[None] = torch.futures.Future()
    done.set_result(None)
    with PeakBytes() as counter:
        held = [torch.ones(64)]
        thread = threading.Thread(target=end, args=(held,))
        thread.start()
        started.wait()
        torch._C._distributed_c10d._create_work_from_future(done).wait()
        new = torch.zeros(64)
        thread.join()
    assert counter.peak == new.nbytes
