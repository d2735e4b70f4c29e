"""Between which bounds measurements lie."""

from __future__ import annotations

from collections.abc import Mapping

from parallelrun.planner.predict.step_time.blocks import (
    ATTENTION,
    CONTEXT,
    EXPERT,
    HOST,
    MEMORY_BOUND,
    PRODUCTS,
    STATISTICS,
    TENSOR,
)
from parallelrun.planner.predict.step_time.offload import OFFLOAD

PIPELINE, BUBBLE, DATA, OPTIMIZER, RECOMPUTE, FIXED = (
    "pipeline communication", "bubble", "data communication", "optimizer", "recompute", "fixed",
)  # fmt: skip
# The relative standard deviation of a part: little for products, whose rates are known, much for what depends on a host
# or on a network, whose published rates differ by factors (dev_h100_efa_allreduce.csv: 12 to 194 GB/s in one cluster).
DEVIATIONS = {
    PRODUCTS: 0.12, RECOMPUTE: 0.12, ATTENTION: 0.18, BUBBLE: 0.22, MEMORY_BOUND: 0.30, HOST: 0.45, OPTIMIZER: 0.45,
    FIXED: 0.45, TENSOR: 0.60, CONTEXT: 0.60, OFFLOAD: 0.60, EXPERT: 0.60, STATISTICS: 0.60, DATA: 0.75, PIPELINE: 0.75,
}  # fmt: skip
# Of a whole step, beside its parts: what nobody publishes of a program and a machine. One plan of the 530 B GPT (tp=8,
# pp=35, dp=8 on A100) ran at 159 TFLOP/s (Narayanan et al. 2021, table 2) and at 126 (Smith et al. 2022, MT-NLG; 129 at
# the batch of the first), a standard deviation of 0.15; with dp=2 at 171 in the first, with dp=1 at 177 in Korthikanti
# et al. 2022, table 5, one of 0.02. The mean of both variances is 0.107 squared. So few measurements leave room up to
# 0.158, where Student's t with two degrees of freedom has its p90; within it, 0.135 was chosen so that four of five of
# the published rows that may be looked at lie between the bounds.
OF_ALL = 0.135
P90 = 1.28  # standard deviations of a normal distribution


def bounds(parts: Mapping[str, float]) -> tuple[float, float]:
    """(p10, p90) in seconds of a step with these parts: eight of ten measurements lie between them."""
    total = sum(parts.values())
    variance = OF_ALL**2 + sum((DEVIATIONS[name] * seconds / total) ** 2 for name, seconds in parts.items())
    factor = 1 + P90 * variance**0.5
    return total / factor, total * factor
