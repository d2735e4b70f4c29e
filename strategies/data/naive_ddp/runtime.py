"""The runtime of naive_ddp: a loop over the parameters, after backward."""

from __future__ import annotations

from parallelrun.distributed import comm
from parallelrun.planner.pieces.expert_axes import replica_axis
from parallelrun.training.loop.data_runtime import DataRuntime


class NaiveDDPRuntime(DataRuntime):
    """Sums one gradient after the other over the ranks that hold copies of its parameter, and waits for each."""

    def finish_gradients(self) -> None:
        """Make every gradient the sum over its copies. Losses are divided by the global count: nothing is averaged."""
        super().finish_gradients()  # a parameter that backward did not reach sends zeros: collectives must match
        for parameter in self.parameters:
            assert parameter.tensor.grad is not None
            group = self._mesh.group(replica_axis(parameter.layout, self._plan))
            comm.all_reduce(parameter.tensor.grad, group, "gradients")


RUNTIME = NaiveDDPRuntime
