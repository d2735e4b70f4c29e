"""The keys of `strategy.data` with kind=zero1. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from ..common.keys import BucketKeys


@dataclass
class ZeRO1Config(BucketKeys):
    """Keys of `strategy.data` with kind=zero1."""

    kind: str = "zero1"
