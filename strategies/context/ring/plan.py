"""Prediction of ring attention: keys and values travel from rank to rank. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from ..common.ring_plan import RingContext
from .keys import RingContextConfig


@dataclass(frozen=True)
class RingAttention(RingContext):
    """Ring attention (Liu et al. 2023) over all of cp."""

    kind = "ring"
    config_class = RingContextConfig
