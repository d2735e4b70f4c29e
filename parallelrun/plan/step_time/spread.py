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
# All were scaled together, so that four of five rows of the published sets lie between the bounds.
DEVIATIONS = {
    PRODUCTS: 0.12, RECOMPUTE: 0.12, ATTENTION: 0.18, BUBBLE: 0.22, MEMORY_BOUND: 0.30, HOST: 0.45, OPTIMIZER: 0.45,
    FIXED: 0.45, TENSOR: 0.60, CONTEXT: 0.60, EXPERT: 0.60, STATISTICS: 0.60, DATA: 0.75, PIPELINE: 0.75,
}  # fmt: skip
OF_ALL = 0.06  # of a whole step, beside its parts
P90 = 1.28  # standard deviations of a normal distribution


def bounds(parts: Mapping[str, float]) -> tuple[float, float]:
    """(p10, p90) in seconds of a step with these parts: eight of ten measurements lie between them."""
    total = sum(parts.values())
    variance = OF_ALL**2 + sum((DEVIATIONS[name] * seconds / total) ** 2 for name, seconds in parts.items())
    factor = 1 + P90 * variance**0.5
    return total / factor, total * factor
