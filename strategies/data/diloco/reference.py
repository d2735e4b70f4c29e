"""The rule of DiLoCo in plain words (Douillard et al. 2023, algorithm 1), by torch's own SGD as the outer optimizer."""

from __future__ import annotations

import torch
from torch import Tensor

from parallelrun.config.schema.run_schema import Config
from parallelrun.planner.contract.plan import Plan
from parallelrun.training.verify.replay import OwnGradientsRule

from .plan import DiLoCo


class DiLoCoRule(OwnGradientsRule):
    """Averages how far replicas have moved. The shared weights begin as those of the first step."""

    def __init__(self, plan: Plan):
        self._strategy = DiLoCo.of(plan)
        self._shared: dict[str, Tensor] = {}
        self._outer: torch.optim.Optimizer | None = None

    def begin(self, weights: list[dict[str, Tensor]]) -> None:
        """Copy the weights with which all replicas begin."""
        strategy = self._strategy
        self._shared = {name: weight.clone() for name, weight in weights[0].items()}
        self._outer = torch.optim.SGD(
            list(self._shared.values()),
            lr=strategy.outer_lr,
            momentum=strategy.outer_momentum,
            nesterov=strategy.outer_nesterov,
        )

    def after_update(self, step: int, weights: list[dict[str, Tensor]]) -> None:
        """At the end of a round, take the outer step by the mean movement; every replica continues from its result."""
        if step % self._strategy.sync_every and step != self._strategy.steps:
            return
        assert self._outer is not None
        for name, shared in self._shared.items():
            shared.grad = torch.stack([shared - replica[name] for replica in weights]).mean(0)
        self._outer.step()
        for replica in weights:
            for name, shared in self._shared.items():
                replica[name].copy_(shared)


def rule(config: Config, plan: Plan) -> DiLoCoRule:
    return DiLoCoRule(plan)
