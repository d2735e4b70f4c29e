"""Prediction of gathered keys and values. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from parallelrun.base.precision import BYTES
from parallelrun.planner.contract.plan import Collective, Plan

from ..common.plan import GRADIENTS, KEYS, BlockwiseContext
from .keys import AllGatherContextConfig


@dataclass(frozen=True)
class GatheredAttention(BlockwiseContext):
    """Llama 3's context parallelism: one all-gather in forward; in backward again, and one reduce-scatter."""

    kind = "allgather"
    config_class = AllGatherContextConfig
    explained = (
        "The keys and values of all ranks are gathered before attention; queries stay. Under grouped-query attention "
        "they are few. Backward gathers them again, and a reduce-scatter returns their gradients.",
        "Grattafiori et al. 2024 (Llama 3)",
    )

    def bringing(self, size: int, numel: int, plan: Plan) -> list[Collective]:
        """A buffer of all ranks' blocks."""
        payload = size * numel * BYTES[plan.precision.compute]
        return [Collective(self.axes(plan)[0], "all_gather", KEYS, 1, payload)]

    def returning(self, size: int, numel: int, plan: Plan) -> list[Collective]:
        """The gradients of that buffer."""
        payload = size * numel * BYTES[plan.precision.accurate]
        return [Collective(self.axes(plan)[0], "reduce_scatter", GRADIENTS, 1, payload)]

    def held_numel(self, size: int, numel: int) -> tuple[int, int]:
        """All blocks, and copies of those of others on their way; the sums of all, and of one's own."""
        return (2 * size - 1) * numel, (size + 1) * numel
