"""Names of the expert axis and of its parts, where rows go over two levels. Torch-free."""

from __future__ import annotations

from parallelrun.plan.structure import Plan

AXIS, OUTER, INNER = "ep", "ep_outer", "ep_inner"


def legs(plan: Plan) -> tuple[str, ...]:
    """The axes that rows go over to their experts, in turn; they come back the other way round."""
    return (INNER, OUTER) if plan.expert.group_size > 1 else (AXIS,)
