"""The keys that several kinds of `strategy.context` share. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from parallelrun.config.schema.field import key
from parallelrun.config.schema.run_schema import ContextConfig

ORDERS = ("contiguous", "zigzag", "striped")  # the names of `plan.context_order`, which knows what they mean


@dataclass
class OrderKeys(ContextConfig):
    """The order of tokens."""

    order: str | None = key(
        None, "positions of a cp rank; null: zigzag, or contiguous without a causal mask", choices=ORDERS
    )
