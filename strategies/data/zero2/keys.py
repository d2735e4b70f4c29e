"""The keys of `strategy.data` with kind=zero2. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from ..common.keys import BucketKeys


@dataclass
class ZeRO2Config(BucketKeys):
    """Keys of `strategy.data` with kind=zero2."""

    kind: str = "zero2"
