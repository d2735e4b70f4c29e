"""Prediction of keys and values that travel around a ring. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from parallelrun.base.precision import BYTES
from parallelrun.planner.contract.plan import Collective, Plan
from parallelrun.planner.predict.step_time import overlap

from .plan import GRADIENTS, KEYS, BlockwiseContext


@dataclass(frozen=True)
class RingContext(BlockwiseContext):
    """Context parallelism over a ring: in each step a rank attends to one block, while the next one arrives."""

    in_turn = True
    explained = (
        "Every rank has the keys and values of its own tokens. In each step it sends the block that it has to the next "
        "rank and attends to it meanwhile; results are merged by their log-sum-exp. In backward the blocks travel "
        "again, and their gradients follow one step behind, until they are home.",
        "Liu et al. 2023 (Ring Attention)",
    )

    def bringing(self, size: int, numel: int, plan: Plan) -> list[Collective]:
        """A message for each of the other ranks' blocks."""
        axis, calls = self.axes(plan)[0], size - 1
        payload = calls * numel * BYTES[plan.precision.compute]
        return [Collective(axis, "send", KEYS, calls, payload), Collective(axis, "recv", KEYS, calls, 0)]

    def returning(self, size: int, numel: int, plan: Plan) -> list[Collective]:
        """`size` messages bring a block's gradients around the ring and home."""
        axis, payload = self.axes(plan)[0], size * numel * BYTES[plan.precision.accurate]
        return [Collective(axis, "send", GRADIENTS, size, payload), Collective(axis, "recv", GRADIENTS, size, 0)]

    def held_numel(self, size: int, numel: int) -> tuple[int, int]:
        """The block that is attended to and the next one; a sum that leaves and one that arrives."""
        return min(2, size - 1) * numel, 2 * numel

    def exposed_s(self, communication: float, attention: float, plan: Plan) -> float:
        """A block travels under the attention to the one before it; the exchange of heads waits."""
        ring, heads = (plan.mesh.size(axis) for axis in self.axes(plan))
        return overlap.exposed_s(communication, attention, ring) if heads == 1 else communication
