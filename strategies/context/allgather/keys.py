"""The keys of `strategy.context` with kind=allgather. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from ..common.keys import OrderKeys


@dataclass
class AllGatherContextConfig(OrderKeys):
    """Keys of `strategy.context` with kind=allgather."""

    kind: str = "allgather"
