"""Limits of a plan's step time: the seconds that a step would save if one resource cost nothing.

Each limit is found by predicting the same plan again on a cluster without it, so that hidden communication counts as
little as it does in the prediction.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from parallelrun.config.schema.cluster_schema import ClusterConfig
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.predict.step_time.spread import BUBBLE
from parallelrun.planner.predict.step_time.step import StepTime, step_time

ENDLESS = 1e9  # a rate at which nothing takes any time
SMALLEST = 0.005  # of a step; less is no limit
# Resource -> the `cluster` keys that make it free. A group across hosts also uses the links inside them.
FREE: dict[str, dict[str, float]] = {
    "links between hosts": {"inter_gb_s": ENDLESS},
    "links inside a host": {"intra_gb_s": ENDLESS},
    "latency of collectives": {"collective_us": 0.0, "latency_us": 0.0, "hop_us": 0.0},
    "products cut into tiles": {"multiprocessors": 0, "product_ramp": 0.0},
    "memory bandwidth": {"memory_gb_s": ENDLESS},
    "issuing operations": {"operation_us": 0.0, "kernel_us": 0.0},
}


@dataclass(frozen=True)
class Limit:
    """A resource, and the seconds by which a step would be shorter if it cost nothing."""

    name: str
    saved_s: float


def limits(plan: Plan, cluster: ClusterConfig, time: StepTime) -> list[Limit]:
    """Return the limits of the plan, largest first. time: the prediction for the cluster as it is."""
    limits_found = [Limit(name, time.step_s - _without(plan, cluster, keys, time)) for name, keys in FREE.items()]
    limits_found.append(Limit(BUBBLE, time.parts.get(BUBBLE, 0.0)))
    return sorted(
        (limit for limit in limits_found if limit.saved_s >= SMALLEST * time.step_s), key=lambda limit: -limit.saved_s
    )


def _without(plan: Plan, cluster: ClusterConfig, keys: dict[str, float], time: StepTime) -> float:
    """Seconds of a step where the rates of `keys` are as given there."""
    rates = {item.name: getattr(cluster, item.name) for item in fields(cluster)}
    changed: dict[str, Any] = {key: value for key, value in keys.items() if rates[key] is not None}
    time_without = step_time(plan, replace(cluster, **changed)) if changed else None
    return time_without.step_s if time_without else time.step_s
