"""The keys of `strategy.data` with kind=ring. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from ..common.keys import AlgorithmKeys


@dataclass
class RingConfig(AlgorithmKeys):
    """Keys of `strategy.data` with kind=ring."""

    kind: str = "ring"
