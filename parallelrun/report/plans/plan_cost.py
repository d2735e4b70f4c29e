"""Texts of the summary of `parallelrun plan`: cost and time of a step, and of checks for silent data corruption."""

from __future__ import annotations

from collections.abc import Mapping

from parallelrun.base.wording import counted
from parallelrun.config.schema.run_schema import Config
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.facts.corruption_cost import checks
from parallelrun.planner.facts.plan_facts import Facts
from parallelrun.planner.predict import cluster_cost
from parallelrun.planner.predict.step_time.rates import not_given
from parallelrun.planner.predict.step_time.step import why_unknown
from parallelrun.report.figures import bytes_text, count_text, digits, flops_text, seconds_text

MOST_PARTS = 4  # of the time of a step, the longest; --json has all
ROUNDED = 5e-4  # of the longest part, which is printed with three digits


def cost_text(plan: Plan, config: Config, results: Facts) -> str:
    """FLOPs of a step, and the seconds of computing and communicating at peak rates."""
    cost, name = results.cost, plan.precision.name
    text = f"{flops_text(cost.model_flops)} per step"
    if cost.hardware_flops > cost.model_flops:
        text += f", {flops_text(cost.hardware_flops)} with recompute={plan.recompute}"
    if cost.compute_s is None:
        return f"{text}\ntime unknown: {not_given(plan, config.cluster)}; try cluster=h100_80gb"
    peak = f"{(cluster_cost.peak_flops(config.cluster, name) or 0) / 1e12:g} TFLOP/s"
    text += f"\ncomputation takes {seconds_text(cost.compute_s)}, bubble included, at the peak rate of {name} ({peak})"
    if cost.step_s is None or cost.communication_s is None:
        return f"{text}\ncommunication: unknown, because the cluster gives no link rates"
    text += f"\ncommunication takes {seconds_text(cost.communication_s)} on the busiest rank at the links' rates"
    if results.time:
        return text
    high, low = cost.step_s
    return (
        f"{text}\na step takes {seconds_text(low)} (communication overlapped) to {seconds_text(high)} (not overlapped) "
        f"or longer: {digits(plan.batch.global_batch / high)} to {digits(plan.batch.global_batch / low)} samples/s"
    )


def time_text(plan: Plan, config: Config, results: Facts) -> str:
    """The predicted time of a step and the parts that it consists of."""
    time = results.time
    if time is None:
        return f"not predicted: {why_unknown(plan, config.cluster)}"
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


def corruption_text(plan: Plan, config: Config) -> str:
    """The cost of the checks, and what they leave out; empty for a run without them."""
    checked = checks(plan, config)
    if checked is None:
        return ""
    lines = [
        f"every {counted(checked.every, 'step')} 1 batch of {counted(checked.samples, 'sample')} computed again: "
        f"{checked.share_of_flops:.2%} more FLOPs",
        f"besides {bytes_text(checked.host_bytes)} of host memory on a rank for copies of its state",
    ]
    if checked.wire_bytes:
        lines[1] += f"; a check sends {bytes_text(checked.wire_bytes)}"
    if checked.check_s is not None and checked.share_of_time is not None:
        lines[0] += f", {checked.share_of_time:.2%} more time ({seconds_text(checked.check_s)} a check)"
    gaps = []
    if checked.alone:
        gaps.append(f"{checked.alone:.0%} of the optimizer's state, which no other rank holds as well")
    if plan.data.independent:
        gaps.append("what makes replicas differ, which train apart and are not compared")
    if not (config.sdc.recompute and checked.every == 1):
        fix = "sdc.every=1" if config.sdc.recompute else "sdc.recompute=true"
        gaps.append(f"what goes wrong in computing in one step alone (see {fix})")
    if gaps:
        lines.append(f"not seen: {'; '.join(gaps)}")
    return "\n".join(lines)
