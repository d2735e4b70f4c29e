"""The rule of ddp with compressed gradients."""

from __future__ import annotations

from parallelrun.config.schema import Config
from parallelrun.plan.structure import Plan
from parallelrun.verify.replay import ReplayRule

from ..compression import replay
from .plan import DDP


def rule(config: Config, plan: Plan) -> ReplayRule:
    """The rule of a plan whose gradients are compressed sums."""
    return replay.rule(plan, DDP.of(plan).compression)
