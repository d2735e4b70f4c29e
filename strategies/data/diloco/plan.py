"""The plan of DiLoCo (Douillard et al. 2023): the traffic of local SGD, and an outer optimizer.

The inner optimizer is the run's (AdamW in the paper), the outer one SGD with Nesterov momentum.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from parallelrun.base.errors import Problem
from parallelrun.planner.contract.plan import Equivalence, Plan
from parallelrun.planner.contract.request import Request

from ..common.independent_plan import IndependentReplicas
from ..common.keys import DiLoCoConfig


@dataclass(frozen=True)
class DiLoCo(IndependentReplicas):
    """outer_*: of the SGD that updates the shared weights by the replicas' mean movement of a round."""

    kind = "diloco"
    config_class = DiLoCoConfig
    kept_states = 2  # the shared weights, and the outer momentum
    default_sync_every = 10  # the paper uses 500; with 10, a run of 60 steps on a laptop has six rounds

    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    outer_nesterov: bool = True

    @classmethod
    def check(cls, request: Request) -> list[Problem]:
        data = DiLoCoConfig.of(request.config)
        if not (data.outer_nesterov and data.outer_momentum == 0):
            return []
        message, where = "outer_nesterov=true needs outer_momentum > 0", "strategy.data.outer_momentum"
        return [Problem(message, where, "strategy.data.outer_nesterov=false", kind="undefined")]

    @classmethod
    def resolve(cls, request: Request) -> DiLoCo:
        data, base = DiLoCoConfig.of(request.config), super().resolve(request)
        outer_lr, outer_momentum, outer_nesterov = data.outer_lr, data.outer_momentum, data.outer_nesterov
        return replace(base, outer_lr=outer_lr, outer_momentum=outer_momentum, outer_nesterov=outer_nesterov)

    def equivalence(self, plan: Plan) -> Equivalence:
        return Equivalence("replay", f"DiLoCo: an outer step every {self.sync_every} steps")
