"""DiLoCo (Douillard et al. 2023): replicas train by themselves for H steps, an outer SGD follows their mean movement.

The inner optimizer is the run's (AdamW in the paper), the outer one SGD with Nesterov momentum; its gradient is what a
round has moved the weights by. It sends what local SGD sends. Every rank keeps the shared weights of the round's
beginning and the outer momentum.
"""

from __future__ import annotations

from parallelrun.errors import Problem
from parallelrun.plan.strategy import Request
from parallelrun.plan.structure import DataWay, Equivalence, Plan

from ..local_sgd import plan as local_sgd
from .settings import DilocoWay

DEFAULT_SYNC_EVERY = 10  # the paper has 500; a laptop's run of 60 steps shall see six rounds


class Way(local_sgd.Way):
    """Local SGD's layouts and traffic, and two more tensors per weight."""

    reads = ("bucket_mb", "sync_every", "outer_lr", "outer_momentum", "outer_nesterov")
    explained = (
        "Replicas train by themselves for `sync_every` steps; then one all-reduce a bucket averages how far they have "
        "moved, and an outer SGD with Nesterov momentum follows that average.",
        "Douillard et al. 2023",
    )
    kept_states = 2  # the shared weights, and the outer momentum

    def check(self, request: Request) -> list[Problem]:
        data = request.config.strategy.data
        if not (data.outer_nesterov and data.outer_momentum == 0):
            return []
        what = "strategy.data.outer_momentum=0 leaves Nesterov's outer step nothing to look ahead by"
        return [Problem(what, "strategy.data.outer_momentum", "strategy.data.outer_nesterov=false", kind="undefined")]

    def resolve(self, request: Request) -> DataWay:
        data = request.config.strategy.data
        return DilocoWay(
            data.kind,
            bucket_bytes=int(data.bucket_mb * 2**20),
            sync_every=data.sync_every or DEFAULT_SYNC_EVERY,
            steps=request.config.steps,
            outer_lr=data.outer_lr,
            outer_momentum=data.outer_momentum,
            outer_nesterov=data.outer_nesterov,
        )

    def equivalence(self, plan: Plan) -> Equivalence:
        assert isinstance(plan.data, DilocoWay)
        return Equivalence("replay", f"DiLoCo: an outer step every {plan.data.sync_every} steps")
