"""FLOPs and seconds of a plan's step, as texts of the summary of `parallelrun plan`. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping

from parallelrun.config.schema import Config
from parallelrun.plan import cluster_cost
from parallelrun.plan.facts import Facts
from parallelrun.plan.step_time.rates import not_given
from parallelrun.plan.step_time.step import why_unknown
from parallelrun.plan.structure import Plan
from parallelrun.report.figures import count_text, digits, flops_text, seconds_text

MOST_PARTS = 4  # of the time of a step, the longest; --json has all
ROUNDED = 5e-4  # of the longest part, which is printed with three digits


def cost_text(plan: Plan, config: Config, found: Facts) -> str:
    """FLOPs of a step, and the seconds of computing and communicating at peak rates."""
    cost, name = found.cost, plan.precision.name
    text = f"{flops_text(cost.model_flops)} per step"
    if cost.hardware_flops > cost.model_flops:
        text += f", {flops_text(cost.hardware_flops)} with recompute={plan.recompute}"
    if cost.compute_s is None:
        return f"{text}\ntime unknown: {not_given(plan, config.cluster)}; try cluster=a100_80gb"
    peak = f"{(cluster_cost.peak_flops(config.cluster, name) or 0) / 1e12:g} TFLOP/s"
    text += f"\ncomputation takes {seconds_text(cost.compute_s)}, bubble included, at the peak rate of {name} ({peak})"
    if cost.step_s is None or cost.communication_s is None:
        return f"{text}\ncommunication: unknown, because the cluster gives no link rates"
    text += f"\ncommunication takes {seconds_text(cost.communication_s)} on the busiest rank at the links' rates"
    if found.time:
        return text
    high, low = cost.step_s
    return (
        f"{text}\na step takes {seconds_text(low)} (communication overlapped) to {seconds_text(high)} (not overlapped) "
        f"or longer: {digits(plan.batch.global_batch / high)} to {digits(plan.batch.global_batch / low)} samples/s"
    )


def time_text(plan: Plan, config: Config, found: Facts) -> str:
    """The predicted time of a step and the parts that it consists of."""
    time = found.time
    if time is None:
        known = f"\nat least {_sum_text(found.known_parts)}" if found.known_parts else ""
        return f"not predicted: {why_unknown(plan, config.cluster)}{known}"
    return (
        f"a step takes about {seconds_text(time.step_s)} ({seconds_text(time.p10_s)} to {seconds_text(time.p90_s)}): "
        f"{count_text(time.tokens_per_s_per_gpu)} tokens/s per GPU, {time.mfu:.0%} of the peak\n"
        f"= {_sum_text(time.parts)}"
    )


def _sum_text(parts: Mapping[str, float]) -> str:
    """The longest parts and the sum of the others, unless it is rounded away."""
    shown = sorted(parts.items(), key=lambda part: -part[1])
    if len(shown) > MOST_PARTS:
        others = sum(seconds for _, seconds in shown[MOST_PARTS:])
        shown[MOST_PARTS:] = [("others", others)] if others > ROUNDED * shown[0][1] else []
    return " + ".join(f"{name} {seconds_text(seconds)}" for name, seconds in shown)
