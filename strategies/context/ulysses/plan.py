"""Prediction of Ulysses: tokens are exchanged for heads. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from parallelrun.planner.contract.request import Request

from ..common.plan import BlockwiseContext
from .keys import UlyssesContextConfig


@dataclass(frozen=True)
class UlyssesAttention(BlockwiseContext):
    """DeepSpeed Ulysses: an all-to-all before attention and one behind it; heads stay balanced in any order."""

    kind = "ulysses"
    config_class = UlyssesContextConfig
    explained = (
        "An all-to-all exchanges tokens for heads: each rank attends over complete sequences with some of the heads, "
        "and a second all-to-all brings the results back to their tokens. Backward mirrors both.",
        "Jacobs et al. 2023 (DeepSpeed Ulysses)",
    )

    @classmethod
    def asked_head_ranks(cls, request: Request) -> int:
        """All of cp."""
        return request.cp
