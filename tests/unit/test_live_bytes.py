"""`tests.live_bytes` counts what is made inside it, and nothing that was there before."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.live_bytes import LiveBytes

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
