"""The plan of local SGD (Stich 2019; Lin et al. 2020): the weights of the replicas are averaged every few steps."""

from __future__ import annotations

from dataclasses import dataclass

from parallelrun.planner.contract.plan import Equivalence, Plan

from ..common.independent_plan import IndependentReplicas
from ..common.keys import LocalSGDConfig


@dataclass(frozen=True)
class LocalSGD(IndependentReplicas):
    """Averages weights. The optimizer's state stays local."""

    kind = "local_sgd"
    config_class = LocalSGDConfig
    default_sync_every = 8

    def equivalence(self, plan: Plan) -> Equivalence:
        return Equivalence("replay", f"local SGD: weights averaged every {self.sync_every} steps")
