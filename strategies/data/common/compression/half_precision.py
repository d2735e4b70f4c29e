"""Compression to 16 bits at run time (Horovod's `Compression.fp16`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from parallelrun.distributed.comm import Waitable
from parallelrun.planner.contract.plan import Plan
from parallelrun.training.loop.data_runtime import DataRuntime

from ..bucketed_plan import BucketedAllReduce
from ..reducer import Kept, Part, Sum


def sender(
    buffer: Tensor, parts: Sequence[Part], plan: Plan, start_sum: Sum, runtime: DataRuntime
) -> tuple[Callable[[], Waitable], Kept]:
    """Return a function that starts the exchange of `buffer`. A resumed run needs nothing of it."""
    return HalfSum(buffer, start_sum, getattr(torch, BucketedAllReduce.of(plan).compression.dtype(plan))).start, []


class HalfSum:
    """Cast to 16 bits, sum, cast back."""

    def __init__(self, buffer: Tensor, start_sum: Sum, dtype: torch.dtype):
        self._buffer, self._start_sum = buffer, start_sum
        self._half = torch.empty_like(buffer, dtype=dtype)
        self._work: Waitable | None = None

    def start(self) -> Waitable:
        """Start the exchange of the buffer's current values."""
        self._half.copy_(self._buffer)
        self._work = self._start_sum(self._half)
        return self

    def wait(self) -> None:
        """Wait until the buffer holds the sum."""
        assert self._work is not None, "nothing was started"
        self._work.wait()
        self._buffer.copy_(self._half)
