"""The predicted time of a step beside the measured one, and the constant that explains most of the difference."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import exp, inf, log
from typing import Any

from parallelrun.config.keys import known_keys
from parallelrun.config.schema.cluster_schema import ClusterConfig
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.predict.step_time.blocks import CONTEXT, EXPERT, STATISTICS, TENSOR
from parallelrun.planner.predict.step_time.cores import ranks_per_core
from parallelrun.planner.predict.step_time.spread import BUBBLE, DATA, OPTIMIZER, PIPELINE
from parallelrun.planner.predict.step_time.step import StepTime, step_time

STEP = "step_s"
# The measured part (`training.metrics.timing.StepTimes`) that a predicted part belongs to; all others are computing.
COMPUTING = "compute_s"
MEASURED_AS = {
    **dict.fromkeys((TENSOR, CONTEXT, EXPERT, STATISTICS, DATA), "comm_exposed_s"),
    **dict.fromkeys((PIPELINE, BUBBLE), "bubble_s"),
}
AGREES = 0.05  # relative difference below which nothing is explained
WIDEST = 16.0  # factor by which a constant is changed at most
STEPS = 8  # of the bisection for its value, which end within 1.1 % of it


@dataclass(frozen=True)
class LikelyCause:
    """The `cluster` key that alone, with the value `instead`, brings the prediction closest to what was measured.

    explains: the part of the differences, summed over the measured parts, that is gone then.
    """

    key: str
    value: float
    instead: float
    explains: float


def beside(plan: Plan, cluster: ClusterConfig, measured: Mapping[str, float | None]) -> dict[str, Any] | None:
    """Return the predicted step and parts, and the LikelyCause, ready for JSON; None without a prediction.

    measured: seconds of the step, `step_s`, and of the parts that were timed, by the names of StepTimes. Where ranks
    share cores, parts are not compared (`compares_parts`): a rank that waits to communicate may wait for a core.
    """
    time = step_time(plan, cluster)
    if time is None:
        return None
    by_part = ranks_per_core(plan, cluster) == 1
    compared = {name: s for name, s in measured.items() if s is not None and (name == STEP or by_part)}
    reason = explanation(plan, cluster, compared) if compared.get(STEP) else None
    fields = {name: getattr(time, name) for name in ("step_s", "p10_s", "p90_s")}
    timed = {**as_measured(time), "optimizer_s": time.parts.get(OPTIMIZER, 0.0)}
    parts = {"parts": dict(time.parts), "compares_parts": by_part}
    return {**fields, **timed, **parts, "explanation": asdict(reason) if reason else None}


def as_measured(time: StepTime) -> dict[str, float]:
    """The predicted seconds of the parts that a run measures, except waiting for data."""
    sums = {COMPUTING: 0.0, **dict.fromkeys(MEASURED_AS.values(), 0.0)}
    for name, seconds in time.parts.items():
        sums[MEASURED_AS.get(name, COMPUTING)] += seconds
    return sums


def explanation(plan: Plan, cluster: ClusterConfig, measured: Mapping[str, float]) -> LikelyCause | None:
    """Return the constant that explains most; of those that explain the same, the one that changes least.

    None if the prediction agrees, or if no constant explains anything.
    """
    parts = {name: seconds for name, seconds in measured.items() if name == COMPUTING or name in MEASURED_AS.values()}
    goal = parts or {STEP: measured[STEP]}

    def predicted(**changed: Any) -> dict[str, float]:
        time = step_time(plan, replace(cluster, **changed))
        assert time is not None, "only values of the cluster have changed"
        return as_measured(time) if parts else {STEP: time.step_s}

    def seconds(part: str, key: str, value: float) -> float:
        return predicted(**{key: value})[part]

    now = predicted()
    gaps = {name: wanted - now[name] for name, wanted in goal.items()}
    total = sum(map(abs, gaps.values()))
    if total <= AGREES * measured[STEP]:
        return None
    largest = max(gaps, key=lambda name: abs(gaps[name]))
    candidates = []
    for key, value in _constants(cluster):
        instead = _solved(key, value, partial(seconds, largest, key), now[largest], goal[largest])
        if instead is not None:
            after = predicted(**{key: instead})
            left = sum(abs(wanted - after[name]) for name, wanted in goal.items())
            candidates.append(LikelyCause(f"cluster.{key}", value, instead, 1 - left / total))
    best = max(
        candidates, key=lambda cause: (round(cause.explains, 1), -abs(log(cause.instead / cause.value))), default=None
    )
    return best if best and best.explains > 0 else None


def _constants(cluster: ClusterConfig) -> Iterator[tuple[str, float]]:
    """The rates and times of a cluster; not the peak, which its efficiencies stand for."""
    for name, key in known_keys().items():
        section, _, last = name.rpartition(".")
        value = getattr(cluster, last) if section == "cluster" and key.kind == "float" else None
        if value:
            yield last, value


def _solved(key: str, value: float, seconds: Callable[[float], float], now: float, wanted: float) -> float | None:
    """The value of `key` for which `seconds` are closest to what is wanted; None if they do not come closer.

    now: seconds with the present value. They rise or fall with the key. Bisection, in logarithms.
    """
    bounds = known_keys()[f"cluster.{key}"]
    low, high = bounds.plausible or (0.0, inf if bounds.most is None else bounds.most)
    ends = (max(low, value / WIDEST), min(high, value * WIDEST))
    there, end = max(
        ((seconds(changed), changed) for changed in ends), key=lambda changed: (changed[0] - now) * (wanted - now)
    )
    if (there - now) * (wanted - now) <= 0:
        return None
    if (there - wanted) * (now - wanted) > 0:
        return end

    near, far = log(value), log(end)
    for _ in range(STEPS):
        middle = (near + far) / 2
        if (seconds(exp(middle)) - wanted) * (there - wanted) > 0:
            far = middle
        else:
            near = middle
    return exp((near + far) / 2)
