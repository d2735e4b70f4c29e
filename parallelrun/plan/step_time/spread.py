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
# The relative standard deviation of a part: little for products, whose rates are known, much for what depends on a host
# or on a network, whose published rates differ by factors (dev_h100_efa_allreduce.csv: 12 to 194 GB/s in one cluster).
DEVIATIONS = {
    PRODUCTS: 0.12, RECOMPUTE: 0.12, ATTENTION: 0.18, BUBBLE: 0.22, MEMORY_BOUND: 0.30, HOST: 0.45, OPTIMIZER: 0.45,
    FIXED: 0.45, TENSOR: 0.60, CONTEXT: 0.60, EXPERT: 0.60, STATISTICS: 0.60, DATA: 0.75, PIPELINE: 0.75,
}  # fmt: skip
# Of a whole step, beside its parts: what nobody publishes of a program and a machine. One plan of the 530 B GPT (tp=8,
# pp=35, dp=8 on A100) ran at 159 TFLOP/s (Narayanan et al. 2021, table 2) and at 126 (Smith et al. 2022, MT-NLG), a
# standard deviation of 0.16, of which their batches (2,240 and 1,920) explain 0.01; with dp=2 at 171 in the first, with
# dp=1 at 177 in Korthikanti et al. 2022, table 5, one of 0.02. The mean of both variances is 0.12 squared.
OF_ALL = 0.12
P90 = 1.28  # standard deviations of a normal distribution


def bounds(parts: Mapping[str, float]) -> tuple[float, float]:
    """(p10, p90) in seconds of a step with these parts: eight of ten measurements lie between them."""
    total = sum(parts.values())
    variance = OF_ALL**2 + sum((DEVIATIONS[name] * seconds / total) ** 2 for name, seconds in parts.items())
    factor = 1 + P90 * variance**0.5
    return total / factor, total * factor
