"""Parts of a step's time that can be predicted although the cluster does not give all rates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from parallelrun.config.keys import known_keys
from parallelrun.config.schema.cluster_schema import ClusterConfig
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.predict.cluster_cost import peak_flops
from parallelrun.planner.predict.step_time.blocks import Parts
from parallelrun.planner.predict.step_time.rates import NEEDED
from parallelrun.planner.predict.step_time.spread import BUBBLE, DATA
from parallelrun.planner.predict.step_time.step import step_time


def known_parts(plan: Plan, cluster: ClusterConfig) -> Parts:
    """Seconds that parts of a step take at least; empty if the cluster gives none of the rates that they need.

    The least of two predictions, with the missing rates at either end of what is plausible: a slow device hides
    communication, a fast one computes in no time. Without the bubble and the communication of data, which depend on all
    rates.
    """
    given = {key: getattr(cluster, key) for key in (*NEEDED, "inter_gb_s")}
    given["peak_tflops"] = peak_flops(cluster, plan.precision.name)
    if not any(given.values()):
        return {}
    ranges = {key: known_keys()[f"cluster.{key}"].plausible or () for key, rate in given.items() if not rate}
    ends: list[dict[str, Any]] = [{key: plausible[end] for key, plausible in ranges.items()} for end in (0, 1)]
    slow, fast = (step_time(plan, replace(cluster, **rates)) for rates in ends)
    if slow is None or fast is None:
        return {}
    return {
        name: min(slow.parts[name], fast.parts[name])
        for name in slow.parts
        if name in fast.parts and name not in (BUBBLE, DATA)
    }
