"""The keys of `strategy.context` with kind=usp. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from parallelrun.config.schema.field import key

from ..common.keys import OrderKeys


@dataclass
class USPContextConfig(OrderKeys):
    """Keys of `strategy.context` with kind=usp."""

    kind: str = "usp"
    ulysses: int | None = key(
        None,
        "usp: ranks that exchange tokens for heads; null: the most of cp that divide them",
        least=1,
        of_degrees=True,
    )
