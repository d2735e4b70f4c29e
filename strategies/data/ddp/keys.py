"""The keys of `strategy.data` with kind=ddp. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from ..common.keys import CompressionKeys


@dataclass
class DDPConfig(CompressionKeys):
    """Keys of `strategy.data` with kind=ddp."""

    kind: str = "ddp"
