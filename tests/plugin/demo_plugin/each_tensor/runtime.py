"""The run time: sum every gradient when backward is over."""

from __future__ import annotations

from collections import deque

from parallelrun.distributed import comm
from parallelrun.distributed.comm import Waitable
from parallelrun.training.loop.data_runtime import DataRuntime

from .plan import EachTensor


class EachTensorRuntime(DataRuntime):
    """The optimizer updates complete weights by summed gradients."""

    def finish_gradients(self) -> None:
        super().finish_gradients()
        pending: deque[Waitable] = deque()
        for parameter in self.parameters:
            assert parameter.tensor.grad is not None
            work = comm.all_reduce(parameter.tensor.grad, self._mesh.group("dp"), "gradients", async_op=True)
            assert work is not None  # a runtime is used with dp > 1 only
            pending.append(work)
            if len(pending) == EachTensor.of(self._plan).max_pending:
                pending.popleft().wait()
        while pending:
            pending.popleft().wait()


RUNTIME = EachTensorRuntime
