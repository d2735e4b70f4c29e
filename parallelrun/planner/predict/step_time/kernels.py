"""Seconds of one kernel: a matrix product cut into tiles, attention, and whatever only moves memory."""

from __future__ import annotations

from math import ceil

from parallelrun.planner.predict.step_time.rates import Rates

# Tiles of the products of cuBLAS and CUTLASS for 16-bit numbers; the library takes the fastest.
TILES = ((256, 128), (128, 256), (128, 128))
# A dim that is no multiple of so many elements cannot be loaded in full vectors. Factors: SimuMax and BLOOM's report
# (hidden 14,400 ran a quarter slower than 13,824).
ALIGNMENTS = ((64, 1.15), (8, 2.0))
# Bytes for each element of an operand in fp8: the largest is looked for, then all are rounded and written along and
# across, as products in fp8 read both operands by their inner dim (Transformer Engine, current scaling).
FP8_CAST = 6
# Forward and backward, of `models.float8`, which looks for the largest, divides, rounds and, in backward, transposes.
FP8_CASTS = (2 + 4 + 3, 2 + 4 + 3 + 2)


# The sequence at which fused attention reaches half of its rate: tiles on the diagonal of a causal mask are computed in
# full, and short sequences fill few multiprocessors. FlashAttention-2 (Dao 2023), figures 5-7: head size 128, causal,
# 99 TFLOP/s at 512 tokens, 189 at 16k; on H100 without a mask 309 at 512 and 370 at 16k (FlashAttention-3, figure 5).
CAUSAL_RAMP, WHOLE_RAMP = 450, 100
# The same of torch's kernel for CPUs, and the head size at which it reaches half of its rate. Heads narrower than a
# vector take a slower path: 8 numbers take 1.4 times as long as 16. Measured with torch 2.13 on one core with AVX-512,
# forward and backward: 32, 41 and 51 GFLOP/s at 64, 96 and 512 tokens and head size 16; 16, 54, 66, 69 and 71 GFLOP/s
# at head sizes 8, 24, 48, 64 and 128 and 512 tokens.
CPU_CAUSAL_RAMP, CPU_HEAD_RAMP, CPU_VECTOR, CPU_NARROW = 48, 9, 16, 1.4


def product_s(rows: int, inner: int, columns: int, width: int, rates: Rates, count: int = 1) -> float:
    """Seconds of `count` products (rows x inner) times (inner x columns) in one kernel, numbers of `width` bytes.

    Tiles are computed in waves of one tile per multiprocessor; the last wave takes as long as a full one. Never faster
    than the peak rate, or than its operands are moved.
    """
    flops = 2.0 * count * rows * inner * columns
    if not flops:
        return 0.0
    if rates.multiprocessors:
        flops = min(
            2.0 * ceil(count * ceil(rows / high) * ceil(columns / wide) / rates.multiprocessors)
            * rates.multiprocessors * high * wide * inner
            for high, wide in TILES
        )  # fmt: skip
    ramp = (inner + rates.product_ramp) / inner
    factors = () if rates.synchronous else ALIGNMENTS
    aligned = max((factor for size, factor in factors if inner % size or columns % size), default=1.0)
    computing = flops / (rates.peak_flops * rates.product_efficiency) * ramp * aligned
    moved = count * width * (rows * inner + inner * columns + rows * columns)
    return max(computing, moved / rates.memory_bytes_s) + rates.kernel_s


def attention_s(flops: float, seq: float, head_size: float, causal: bool, rates: Rates) -> float:
    """Seconds of fused attention of so many FLOPs over sequences of `seq` tokens, by heads of `head_size` numbers."""
    if not flops:
        return 0.0
    if rates.synchronous:
        ramp = CPU_CAUSAL_RAMP if causal else 0
        flops *= CPU_NARROW * CPU_VECTOR / head_size if head_size < CPU_VECTOR else 1.0
        flops *= 1 + CPU_HEAD_RAMP / max(head_size, CPU_VECTOR)
    else:
        ramp = CAUSAL_RAMP if causal else WHOLE_RAMP
    return flops / (rates.peak_flops * rates.attention_efficiency) * (seq + ramp) / seq + rates.kernel_s


def streaming_s(num_bytes: float, kernels: int, rates: Rates) -> float:
    """Seconds of kernels that read and write `num_bytes` in all and compute next to nothing."""
    return num_bytes / rates.memory_bytes_s + kernels * rates.kernel_s
