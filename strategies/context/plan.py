"""The context strategies: what travels between the cp ranks."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from parallelrun.base.precision import BYTES
from parallelrun.config.schema.run_schema import Config, ContextConfig
from parallelrun.models.blockwise.tiles import GRADIENTS, KEYS
from parallelrun.planner.contract.collective import Collective
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.contract.request import Request
from parallelrun.planner.predict.step_time import overlap

from . import checks
from .blockwise_plan import BlockwiseContext
from .keys import AllGatherContextConfig, RingContextConfig, UlyssesContextConfig, USPContextConfig


@dataclass(frozen=True)
class RingAttention(BlockwiseContext):
    """Ring attention: in each step a rank attends to one block, while the next one arrives."""

    kind = "ring"
    config_class = RingContextConfig
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


@dataclass(frozen=True)
class UlyssesAttention(BlockwiseContext):
    """DeepSpeed Ulysses: an all-to-all before attention and one after it; heads stay balanced in any order."""

    kind = "ulysses"
    config_class = UlyssesContextConfig
    explained = (
        "An all-to-all exchanges tokens for heads: each rank attends over complete sequences with some of the heads, "
        "and a second all-to-all brings the results back to their tokens. Backward mirrors both.",
        "Jacobs et al. 2023 (DeepSpeed Ulysses)",
    )

    @classmethod
    def asked_head_ranks(cls, request: Request) -> int:
        """All of cp."""
        return request.cp


@dataclass(frozen=True)
class UnifiedSequence(RingAttention):
    """USP: as many ranks as divide the heads exchange tokens for heads, the rest form rings."""

    kind = "usp"
    config_class = USPContextConfig
    explained = (
        "Groups of ranks exchange tokens for heads by an all-to-all. Between the groups keys and values travel around "
        "rings, as in ring attention, and a second all-to-all brings the results back to their tokens.",
        "Fang and Zhao 2024 (USP)",
    )

    @classmethod
    def asked_head_ranks(cls, request: Request) -> int:
        """As given, else the largest divisor of cp that divides the heads of a tp rank."""
        requested = USPContextConfig.of(request.config).ulysses
        if requested is not None:
            return requested
        return gcd(request.cp, max(1, request.spec.heads // checks.head_parts(request)))

    @classmethod
    def filled(cls, request: Request) -> tuple[str, ...]:
        if USPContextConfig.of(request.config).ulysses is not None:
            return super().filled(request)
        why = "the largest that divides cp and the heads"
        return (*super().filled(request), f"strategy.context.ulysses={cls.asked_head_ranks(request)} (filled: {why})")

    def resolved_config(self, config: Config) -> ContextConfig:
        """Return the keys with the resolved number of ranks in a group."""
        return USPContextConfig(order=self.order, ulysses=self.head_ranks)
