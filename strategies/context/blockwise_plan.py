"""Base of all context strategies' plans: mesh dims, order of tokens, traffic and memory in closed form.

The cp ranks are `head_ranks` x the ranks of a ring (or of a gather), the former fastest. An all-to-all over the former
gives a rank all their tokens of some heads; its queries then attend to the keys and values of the latter, which travel.
Each strategy leaves out one of the two, or neither.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from typing import ClassVar

from parallelrun.base.errors import Problem
from parallelrun.base.precision import BYTES
from parallelrun.config.schema.run_schema import ContextConfig
from parallelrun.models.blockwise import memory
from parallelrun.models.blockwise.memory import head_dim, part_of
from parallelrun.models.blockwise.tiles import EXCHANGED, tiles
from parallelrun.planner.contract.collective import Collective
from parallelrun.planner.contract.context_order import (
    ORDERS,
    Imbalance,
    Spans,
    imbalance,
    imbalance_of,
    packed_imbalance,
    part,
)
from parallelrun.planner.contract.context_strategy import ContextStrategy
from parallelrun.planner.contract.data_strategy import FlattenedDims, MeshDims
from parallelrun.planner.contract.messages import (
    ExplainedMessage,
    ExplainedRound,
    Explanation,
    calls_of,
    explanation_by_block,
    ranks_over,
)
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.contract.request import Request
from parallelrun.planner.model.model_spec import BlockSpec
from parallelrun.planner.model.model_spec.attention import AttentionSpec

from . import checks

AXIS, RING, HEADS = "cp", "cp_ring", "cp_heads"
ROUTED = "routing"  # a purpose


@dataclass(frozen=True)
class BlockwiseContext(ContextStrategy):
    """Attention of a rank's queries to block after block of keys.

    head_ranks: ranks that exchange tokens for heads, the inner part of cp. explained: what travels, and the paper.
    """

    explained: ClassVar[tuple[str, str]]

    head_ranks: int = 1

    @classmethod
    def asked_head_ranks(cls, request: Request) -> int:
        """Return the ranks that exchange tokens for heads, legal or not."""
        return 1

    @classmethod
    def asked_order(cls, config: ContextConfig) -> str | None:
        """Return the order that the user asks for; None where it is left open."""
        return getattr(config, "order", None)

    @classmethod
    def resolve(cls, request: Request) -> BlockwiseContext:
        head_ranks = cls.asked_head_ranks(request)
        return cls(checks.order_of(cls.asked_order(request.config.strategy.context), request, head_ranks), head_ranks)

    @classmethod
    def check(cls, request: Request) -> list[Problem]:
        return checks.check(request, cls.asked_head_ranks(request), cls.asked_order(request.config.strategy.context))

    @classmethod
    def filled(cls, request: Request) -> tuple[str, ...]:
        strategy = cls.resolve(request)
        if cls.asked_order(request.config.strategy.context) is not None or strategy.head_ranks == request.cp:
            return ()
        return (f"strategy.context.order={strategy.order} (filled: {checks.balanced_order(request)[1]})",)

    @classmethod
    def mesh_dims(cls, request: Request) -> tuple[MeshDims, FlattenedDims]:
        """One mesh dim, or the ring and inside it the ranks that exchange heads."""
        inner = cls.asked_head_ranks(request)
        if inner in (1, request.cp):
            return ((AXIS, request.cp),), ()
        return ((RING, request.cp // inner), (HEADS, inner)), ((AXIS, (RING, HEADS)),)

    def axes(self, plan: Plan) -> tuple[str, str]:
        """Return (the axis over which keys and values travel, that over which tokens are exchanged for heads)."""
        cp = plan.mesh.size(AXIS)  # an axis that does not occur has one rank
        return RING if self.head_ranks > 1 else AXIS, AXIS if self.head_ranks == cp else HEADS

    def spans(self, index: int, plan: Plan) -> Spans:
        ring, inner = divmod(index, self.head_ranks)
        return part(self.attended_spans(ring, plan), self.head_ranks, inner)

    def attended_spans(self, index: int, plan: Plan) -> Spans:
        """Return the positions of rank `index` of the ring after tokens were exchanged for heads."""
        ring = plan.mesh.size(AXIS) // self.head_ranks
        return ORDERS[self.order].spans(ring, index, plan.spec.seq)

    def orders(self, plan: Plan) -> list[str]:
        ring = plan.mesh.size(AXIS) // self.head_ranks
        if ring == 1 or not (plan.spec.is_causal or plan.spec.packed):
            return []
        return [name for name, order in ORDERS.items() if plan.spec.seq % (ring * order.parts) == 0]

    def imbalance(self, plan: Plan, window: int | None) -> float:
        ring = plan.mesh.size(AXIS) // self.head_ranks
        if ring == 1:
            return 1.0
        spec = plan.spec
        if spec.documents:
            micro_batch = plan.batch.micro_batch
            ratios = packed_imbalance(self.order, ring, spec.seq, spec.is_causal, spec.documents, micro_batch)
        elif window is not None:
            ratios = _windowed_imbalance(self.order, ring, spec.seq, window)
        else:
            ratios = imbalance(self.order, ring, spec.seq) if spec.is_causal else Imbalance(1.0, 1.0)
        return ratios.steps if self.in_turn else ratios.ranks

    # Sizes

    def block_numel(self, plan: Plan) -> int:
        """Return the elements of the keys and values of a rank of the ring, for one microbatch and layer."""
        rows, _, kv_heads = part_of(plan)
        heads = kv_heads * copies_of(kv_heads, self.head_ranks) // self.head_ranks
        return 2 * rows * self.head_ranks * heads * head_dim(plan)

    def exchanged_numel(self, plan: Plan) -> tuple[int, int]:
        """Return the elements of (q, k and v; the output) of own tokens and all heads, which the all-to-alls send."""
        rows, heads, kv_heads = part_of(plan)
        size = rows * head_dim(plan)
        return size * (heads + 2 * kv_heads * copies_of(kv_heads, self.head_ranks)), size * heads

    # Traffic

    def bringing(self, size: int, numel: int, plan: Plan) -> list[Collective]:
        """Return the messages of one layer and microbatch that bring the keys and values of `size` ranks.

        numel: that of `block_numel`.
        """
        return []

    def returning(self, size: int, numel: int, plan: Plan) -> list[Collective]:
        """Return the messages that bring their gradients home."""
        return []

    def collectives(self, blocks: tuple[BlockSpec, ...], plan: Plan) -> list[Collective]:
        calls: Counter[tuple[str, str, str]] = Counter()
        payload: Counter[tuple[str, str, str]] = Counter()
        for block in blocks:
            forward, backward = self.traffic(block, plan)
            forwards = 1 + (plan.runs_again and block.is_recomputed)
            for row in [*forward * forwards, *backward, *_of_routers(block, plan)]:
                calls[row.key] += plan.batch.microbatches * row.calls
                payload[row.key] += plan.batch.microbatches * row.payload_bytes
        return [Collective(*key, calls[key], payload[key]) for key in calls]

    def traffic(self, block: BlockSpec, plan: Plan) -> tuple[list[Collective], list[Collective]]:
        if not attends(block):
            return [], []
        forward: list[Collective] = []
        gradients: list[Collective] = []
        if (size := plan.mesh.size(AXIS) // self.head_ranks) > 1:
            numel = self.block_numel(plan)
            forward, gradients = self.bringing(size, numel, plan), self.returning(size, numel, plan)
        exchange = []
        if self.head_ranks > 1:
            payload = sum(self.exchanged_numel(plan)) * BYTES[plan.precision.compute]
            exchange = [Collective(self.axes(plan)[1], "all_to_all", EXCHANGED, 2, payload)]
        return [*forward, *exchange], [*forward, *gradients, *exchange]

    def exposed_s(self, communication: float, attention: float, plan: Plan) -> float:
        return communication

    # Memory

    def held_numel(self, size: int, numel: int) -> tuple[int, int]:
        """Return the elements of (keys and values of others, sums of gradients) in backward, for a ring of `size`.

        numel: that of `block_numel`.
        """
        return 0, 0

    def passing_bytes(self, plan: Plan, attention: AttentionSpec) -> int:
        """Return the bytes in flight on rank 0, which holds most, beside the sums of its queries' gradients. The
        gradients of one block are as large as those that attention gives when they are gone."""
        rows, heads, _ = part_of(plan)
        queries = rows * heads * head_dim(plan)
        numel = self.block_numel(plan)
        both = 2 * (queries + numel) * BYTES[plan.precision.compute]  # what leaves and what arrives
        exchanged = both if self.head_ranks > 1 else 0
        size, seq = plan.mesh.size(AXIS) // self.head_ranks, plan.spec.seq
        if size == 1 and not attention.own_scores:
            return exchanged
        held = self.held_numel(size, numel) if size > 1 else (0, numel)
        parts = ORDERS[self.order].parts if attention.window and size > 1 else 1  # a window cuts every part
        length = seq // (size * parts)
        samples = rows * self.head_ranks * size // seq
        scores = memory.tile_scores(attention, samples * (heads // self.head_ranks), length, seq)
        return max(exchanged, memory.passing_bytes(plan, attention, (queries, numel, *held), scores))

    def explain(self, plan: Plan) -> Explanation:
        """Return the messages of the attention of rank 0's stages."""

        def rounds_of(block: BlockSpec, ranks: tuple[int, ...]) -> list[ExplainedRound]:
            rows = self.collectives((block,), plan)
            return [self._explained(row, ranks, plan) for row in rows if row.operation != "recv"]

        return explanation_by_block("context", self.kind, self.explained, plan, self.axes(plan)[0], rounds_of)

    def _explained(self, row: Collective, ranks: tuple[int, ...], plan: Plan) -> ExplainedRound:
        if row.operation != "send":
            return ExplainedRound(row.purpose, calls=calls_of([row], plan, ranks)[0])
        messages = []
        for rank in ranks:
            group = ranks_over(plan, row.axis, rank)
            following = group[(group.index(rank) + 1) % len(group)]
            messages.append(ExplainedMessage(rank, following, row.purpose, row.payload_bytes, row.purpose, row.calls))
        return ExplainedRound(row.purpose, tuple(messages))


@lru_cache(maxsize=256)
def _windowed_imbalance(order: str, size: int, seq: int, window: int) -> Imbalance:
    """The imbalance of one sequence, of which a token sees a window, over `size` ranks."""
    spans = [ORDERS[order].spans(size, index, seq) for index in range(size)]
    return imbalance_of([
        [[sum(tile.work for tile in tiles(spans[rank], spans[rank - step], True, window)) for step in range(size)]
         for rank in range(size)]
    ])  # fmt: skip


def _of_routers(block: BlockSpec, plan: Plan) -> list[Collective]:
    """The gathered scores of the routing groups of one microbatch, in forward only."""
    routers = sum(layer.layer_role == "router" for layer in block.layers)
    calls = routers * (1 + (plan.runs_again and block.is_recomputed))
    samples, accurate = plan.batch.micro_batch // plan.sample_parts, BYTES[plan.precision.accurate]
    scores = samples * plan.spec.seq * plan.spec.experts * accurate
    return [Collective(AXIS, "all_gather", ROUTED, calls, calls * scores)] if calls else []


def attends(block: BlockSpec) -> bool:
    return any(parameter.heads for parameter in block.parameters)


def copies_of(kv_heads: int, ranks: int) -> int:
    """Return how often heads of keys and values are repeated, so that each of the ranks gets some."""
    return ranks // gcd(ranks, kv_heads)
