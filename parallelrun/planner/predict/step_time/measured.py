"""The predicted time of a step, by the parts that a run measures."""

from __future__ import annotations

from typing import Any

from parallelrun.config.schema.cluster_schema import ClusterConfig
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.predict.step_time.blocks import CONTEXT, EXPERT, STATISTICS, TENSOR
from parallelrun.planner.predict.step_time.cores import ranks_per_core
from parallelrun.planner.predict.step_time.spread import BUBBLE, DATA, OPTIMIZER, PIPELINE
from parallelrun.planner.predict.step_time.step import step_time

# The measured part (`training.metrics.timing.StepTimes`) that a predicted part belongs to; all others are computing.
COMPUTING = "compute_s"
MEASURED_AS = {
    **dict.fromkeys((TENSOR, CONTEXT, EXPERT, STATISTICS, DATA), "comm_exposed_s"),
    **dict.fromkeys((PIPELINE, BUBBLE), "bubble_s"),
}


def predicted_step(plan: Plan, cluster: ClusterConfig) -> dict[str, Any] | None:
    """Return the predicted step and parts, ready for JSON; None without a prediction.

    Where ranks share cores, parts do not compare with measured ones (`compares_parts`): a rank that waits to
    communicate may wait for a core.
    """
    time = step_time(plan, cluster)
    if time is None:
        return None
    measured_as = {COMPUTING: 0.0, **dict.fromkeys(MEASURED_AS.values(), 0.0)}
    for name, seconds in time.parts.items():
        measured_as[MEASURED_AS.get(name, COMPUTING)] += seconds
    return {
        **{name: getattr(time, name) for name in ("step_s", "p10_s", "p90_s")},
        **measured_as,
        "optimizer_s": time.parts.get(OPTIMIZER, 0.0),
        "parts": dict(time.parts),
        "compares_parts": ranks_per_core(plan, cluster) == 1,
    }
