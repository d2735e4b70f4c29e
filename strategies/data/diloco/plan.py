"""DiLoCo (Douillard et al. 2023): replicas train alone for H steps; an outer SGD follows their mean movement.

The inner optimizer is the run's (AdamW in the paper), the outer one SGD with Nesterov momentum; its gradient is the
mean difference between the weights at the beginning and at the end of a round. Its traffic is that of local SGD. Every
rank keeps the shared weights of the round's beginning and the outer momentum.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from parallelrun.base.errors import Problem
from parallelrun.planner.contract.plan import Equivalence, Plan
from parallelrun.planner.contract.request import Request

from ..common.independent_plan import IndependentReplicas
from ..common.keys import DiLoCoConfig

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class DiLoCo(IndependentReplicas):
    """Local SGD's layouts and traffic, and two more tensors per weight.

    outer_*: of the SGD that updates the shared weights by the replicas' mean movement of a round.
    """

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
        message = "strategy.data.outer_momentum=0 leaves Nesterov's outer step nothing to look ahead by"
        return [
            Problem(message, "strategy.data.outer_momentum", "strategy.data.outer_nesterov=false", kind="undefined")
        ]

    @classmethod
    def resolve(cls, request: Request) -> Self:
        data = DiLoCoConfig.of(request.config)
        return replace(
            super().resolve(request),
            outer_lr=data.outer_lr,
            outer_momentum=data.outer_momentum,
            outer_nesterov=data.outer_nesterov,
        )

    def equivalence(self, plan: Plan) -> Equivalence:
        return Equivalence("replay", f"DiLoCo: an outer step every {self.sync_every} steps")
