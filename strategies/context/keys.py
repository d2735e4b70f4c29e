"""The keys of `strategy.context` by kind."""

from __future__ import annotations

from dataclasses import dataclass

from parallelrun.config.schema.field import key
from parallelrun.config.schema.run_schema import ContextConfig

ORDERS = ("contiguous", "zigzag", "striped")  # the names of `plan.context_order`, which knows what they mean


@dataclass
class OrderKeys(ContextConfig):
    """The order of tokens."""

    order: str | None = key(
        None, "order of positions over cp ranks; null: zigzag, or contiguous without a causal mask", choices=ORDERS
    )


@dataclass
class RingContextConfig(OrderKeys):
    kind: str = "ring"


@dataclass
class AllGatherContextConfig(OrderKeys):
    kind: str = "allgather"


@dataclass
class UlyssesContextConfig(ContextConfig):
    """Each rank attends to complete sequences, in their order."""

    kind: str = "ulysses"


@dataclass
class USPContextConfig(RingContextConfig):
    kind: str = "usp"
    ulysses: int | None = key(
        None,
        "usp: ranks that exchange tokens for heads; null: the largest divisor of cp and the heads",
        least=1,
        of_degrees=True,
    )
