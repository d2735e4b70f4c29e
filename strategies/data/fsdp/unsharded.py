"""The gradients that FSDP2 does not reduce."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from parallelrun.distributed import comm
from parallelrun.distributed.mesh import Mesh
from parallelrun.planner.contract.plan import Plan
from parallelrun.training.loop.data_runtime import Pair, complete_gradients
from parallelrun.training.loop.flat_tensors import bucket_pairs, flat_views

from .units import is_unsharded


class UnshardedGradients:
    """Sums the gradients of parameters that are in no unit (`is_unsharded`), which FSDP2 ignores, over their copies.

    Backward accumulates them in flat buffers, of which they are views. flat: the buffers, each with its group.
    """

    def __init__(self, pairs: Sequence[Pair], plan: Plan, mesh: Mesh):
        buckets, rest = bucket_pairs(pairs, plan)
        self.flat = []
        self._views: list[tuple[nn.Parameter, Tensor]] = []
        self._works: list[comm.Waitable | None] = []
        for axis, own in buckets:
            weights = [weight for _, weight in own]
            flat = weights[0].new_zeros(sum(weight.numel() for weight in weights))
            self.flat.append((mesh.group(axis), flat))
            self._views += zip(weights, flat_views(flat, [weight.shape for weight in weights]))
        self._unique = [weight for parameter, weight in rest if is_unsharded(parameter, plan)]  # have no copies at all

    def begin(self) -> None:
        """Clear the gradients."""
        for _, flat in self.flat:
            flat.zero_()
        for weight, view in self._views:
            weight.grad = view
        for weight in self._unique:
            weight.grad = None

    def launch(self) -> None:
        """Start the sums."""
        self._works = [comm.all_reduce(flat, group, "gradients", async_op=True) for group, flat in self.flat]

    def finish(self) -> None:
        """Wait for the sums."""
        for work in self._works:
            assert work is not None, "a parameter without copies is in no bucket"
            work.wait()
        complete_gradients(self._unique)
