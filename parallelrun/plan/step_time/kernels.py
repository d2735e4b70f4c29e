"""Seconds of one kernel: a matrix product cut into tiles, attention, and whatever only moves memory."""

from __future__ import annotations

from math import ceil

from parallelrun.plan.step_time.rates import Rates

# Tiles of the products of cuBLAS and CUTLASS for 16-bit numbers; the library takes the fastest.
TILES = ((256, 128), (128, 256), (128, 128))
# A dim that is no multiple of so many elements cannot be loaded in full vectors. Factors: SimuMax and BLOOM's report
# (hidden 14,400 ran a quarter slower than 13,824).
ALIGNMENTS = ((64, 1.15), (8, 2.0))


def product_s(rows: int, inner: int, columns: int, width: int, rates: Rates) -> float:
    """Seconds of (rows x inner) times (inner x columns), numbers of `width` bytes.

    Tiles are computed in waves of one tile per multiprocessor; the last wave takes as long as a full one. Never faster
    than the peak rate, or than its operands are moved.
    """
    flops = 2.0 * rows * inner * columns
    if not flops:
        return 0.0
    if rates.multiprocessors:
        flops = min(
            2.0 * ceil(ceil(rows / high) * ceil(columns / wide) / rates.multiprocessors)
            * rates.multiprocessors * high * wide * inner
            for high, wide in TILES
        )  # fmt: skip
    ramp = (inner + rates.product_ramp) / inner
    factors = () if rates.synchronous else ALIGNMENTS
    aligned = max((factor for size, factor in factors if inner % size or columns % size), default=1.0)
    computing = flops / (rates.peak_flops * rates.product_efficiency) * ramp * aligned
    moved = width * (rows * inner + inner * columns + rows * columns)
    return max(computing, moved / rates.memory_bytes_s) + rates.kernel_s


def attention_s(flops: float, rates: Rates) -> float:
    """Seconds of fused attention of so many FLOPs."""
    return flops / (rates.peak_flops * rates.attention_efficiency) + rates.kernel_s if flops else 0.0


def streaming_s(num_bytes: float, kernels: int, rates: Rates) -> float:
    """Seconds of kernels that read and write `num_bytes` in all and compute next to nothing."""
    return num_bytes / rates.memory_bytes_s + kernels * rates.kernel_s
