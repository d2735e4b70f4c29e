"""The keys of `strategy.context` with kind=ring. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from ..common.keys import OrderKeys


@dataclass
class RingContextConfig(OrderKeys):
    """Keys of `strategy.context` with kind=ring."""

    kind: str = "ring"
