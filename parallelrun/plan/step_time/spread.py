"""Between which bounds measurements lie. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping

from parallelrun.plan.step_time.blocks import (
    ATTENTION,
    CONTEXT,
    EXPERT,
    HOST,
    MEMORY_BOUND,
    PRODUCTS,
    STATISTICS,
    TENSOR,
)

PIPELINE, BUBBLE, DATA, OPTIMIZER, RECOMPUTE, FIXED = (
    "pipeline communication", "bubble", "data communication", "optimizer", "recompute", "fixed",
)  # fmt: skip
# The relative standard deviation of a part: little for products, whose rates are known, more for what depends on a host.
# What is sent has the bands of dev_h100_efa_allreduce.csv, read as p10 to p90: over 2 to 64 nodes the median of
# sqrt(high / low) is 2.28, which is 1 + 1.28 x 1.00.
SENT = 1.0
DEVIATIONS = {
    PRODUCTS: 0.12, RECOMPUTE: 0.12, ATTENTION: 0.18, MEMORY_BOUND: 0.30, HOST: 0.45, OPTIMIZER: 0.45, FIXED: 0.45,
    TENSOR: SENT, CONTEXT: SENT, EXPERT: SENT, STATISTICS: SENT, DATA: SENT, PIPELINE: SENT,
}  # fmt: skip
# Not in the schedule of the stages: the other parts also make up the bubble, which is as wrong as they are.
OUTSIDE_STAGES = (OPTIMIZER, FIXED, DATA, PIPELINE)
# Of a whole step, beside its parts: what nobody publishes of a program and a machine. One plan of the 530 B GPT (tp=8,
# pp=35, dp=8 on A100) ran at 159 TFLOP/s (Narayanan et al. 2021, table 2) and at 126 (Smith et al. 2022, MT-NLG), a
# standard deviation of 0.16, of which their batches (2,240 and 1,920) explain 0.01; with dp=2 at 171 in the first, with
# dp=1 at 177 in Korthikanti et al. 2022, table 5, one of 0.02. The mean of both variances is 0.12 squared.
OF_ALL = 0.12
P90 = 1.28  # standard deviations of a normal distribution


def bounds(parts: Mapping[str, float]) -> tuple[float, float]:
    """(p10, p90) in seconds of a step with these parts: eight of ten measurements lie between them."""
    total, work = sum(parts.values()), {name: seconds for name, seconds in parts.items() if name != BUBBLE}
    in_stages = sum(seconds for name, seconds in work.items() if name not in OUTSIDE_STAGES)
    with_bubble = 1 + parts[BUBBLE] / in_stages if parts.get(BUBBLE) else 1.0
    variance = OF_ALL**2
    for name, seconds in work.items():
        in_total = seconds if name in OUTSIDE_STAGES else seconds * with_bubble
        variance += (DEVIATIONS[name] * in_total / total) ** 2
    factor = 1 + P90 * variance**0.5
    return total / factor, total * factor
