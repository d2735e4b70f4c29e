"""The rule of local SGD in plain words: replicas keep their gradients; every H steps weights become their mean."""

from __future__ import annotations

import torch
from torch import Tensor

from parallelrun.config.schema.run_schema import Config
from parallelrun.planner.contract.plan import Plan
from parallelrun.training.verify.replay import OwnGradientsRule

from .plan import LocalSGD


class LocalSGDRule(OwnGradientsRule):
    """Averages weights, not gradients."""

    def __init__(self, sync_every: int, steps: int):
        self._sync_every, self._steps = sync_every, steps

    def after_update(self, step: int, weights: list[dict[str, Tensor]]) -> None:
        """Replace weights by their mean after every H-th step and after the last."""
        if step % self._sync_every and step != self._steps:
            return
        for name in weights[0]:
            mean = torch.stack([replica[name] for replica in weights]).mean(0)
            for replica in weights:
                replica[name].copy_(mean)


def rule(config: Config, plan: Plan) -> LocalSGDRule:
    """The rule of a plan. It reads the plan's numbers and none of the runtime's code."""
    strategy = LocalSGD.of(plan)
    return LocalSGDRule(strategy.sync_every, strategy.steps)
