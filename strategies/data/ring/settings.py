"""What a plan says of `ring` beyond any way that compresses. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..allreduce.settings import Algorithm
from ..allreduce.steps import RING
from ..compression.settings import CompressedWay


@dataclass(frozen=True)
class RingWay(CompressedWay):
    """algorithm: how gradients are summed."""

    algorithm: Algorithm = field(default_factory=lambda: Algorithm(RING))
