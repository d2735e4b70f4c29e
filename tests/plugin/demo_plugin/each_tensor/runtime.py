"""The run time: sum every gradient when backward is over."""

from __future__ import annotations

from parallelrun import comm
from parallelrun.train.data_runtime import DataRuntime


class EachTensorRuntime(DataRuntime):
    """The optimizer updates complete weights by summed gradients."""

    def finish_gradients(self) -> None:
        super().finish_gradients()
        for parameter in self.parameters:
            assert parameter.tensor.grad is not None
            comm.all_reduce(parameter.tensor.grad, self._mesh.group("dp"), "gradients")


RUNTIME = EachTensorRuntime
