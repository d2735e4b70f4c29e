"""What every strategy of a plan has to explain, asked of the strategies themselves. Torch-free."""

from __future__ import annotations

from parallelrun.errors import ConfigError, Problem
from parallelrun.plan.messages import Explanation
from parallelrun.plan.structure import Plan


def explain(plan: Plan) -> tuple[Explanation, ...]:
    """Of each axis with several ranks, the messages of its strategy. Raises ConfigError for a plan of one rank."""
    if plan.world == 1:
        what = "one rank sends nothing, so there is nothing to explain"
        raise ConfigError(Problem(what, "world", "world=4", "parallelrun explain strategy=ring world=4"))
    asked = [
        (plan.tensor, plan.mesh.size("tp") > 1),
        (plan.expert, plan.expert is not None),
        (plan.pipeline, plan.mesh.size("pp") > 1),
        (plan.data, plan.mesh.size("dp") > 1 or plan.servers > 0),
    ]
    return tuple(strategy.explain(plan) for strategy, has_ranks in asked if has_ranks and strategy is not None)
