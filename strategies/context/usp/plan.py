"""Prediction of the unified sequence parallelism: Ulysses within groups, a ring between them. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from parallelrun.config.schema.run_schema import Config, ContextConfig
from parallelrun.planner.contract.request import Request

from ..common import checks
from ..common.ring_plan import RingContext
from .keys import USPContextConfig


@dataclass(frozen=True)
class UnifiedSequence(RingContext):
    """USP (Fang and Zhao 2024): as many ranks as divide the heads exchange tokens for heads, the rest form rings."""

    kind = "usp"
    config_class = USPContextConfig
    explained = (
        "Groups of ranks exchange tokens for heads by an all-to-all. Between the groups keys and values travel around "
        "rings, as in ring attention, and a second all-to-all brings the results back to their tokens.",
        "Fang and Zhao 2024 (USP)",
    )

    @classmethod
    def asked_head_ranks(cls, request: Request) -> int:
        """As given, else the largest divisor of cp that divides the heads of a tp rank."""
        asked = USPContextConfig.of(request.config).ulysses
        return asked if asked is not None else gcd(request.cp, max(1, request.spec.heads // checks.head_parts(request)))

    @classmethod
    def filled(cls, request: Request) -> tuple[str, ...]:
        if USPContextConfig.of(request.config).ulysses is not None:
            return super().filled(request)
        why = "the largest that divides cp and the heads"
        return (*super().filled(request), f"strategy.context.ulysses={cls.asked_head_ranks(request)} (filled: {why})")

    def resolved_config(self, config: Config) -> ContextConfig:
        """Return the keys with the resolved number of ranks in a group."""
        return USPContextConfig(order=self.order, ulysses=self.head_ranks)
