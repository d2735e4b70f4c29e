"""Bytes that attention to blocks of keys holds in its backward pass, beyond what it saves."""

from __future__ import annotations

from parallelrun.base.precision import BYTES
from parallelrun.planner.contract.plan import Plan, once
from parallelrun.planner.model.model_spec.attention import ROWS, AttentionSpec
from parallelrun.planner.model.product import degree

SCORES = 4  # tensors of so many scores are alive at once in their backward; with a soft cap one more


def part_of(plan: Plan) -> tuple[int, int, int]:
    """Return what a rank of tp has of attention: (positions of its samples, heads, heads of keys and values)."""
    return once(plan.cache, "part of attention", lambda: _part_of(plan))


def _part_of(plan: Plan) -> tuple[int, int, int]:
    spec, rows, parts = plan.spec, plan.num_rows, 1
    layer = next(layer for layer in spec.layers() if any(parameter.heads for parameter in layer.parameters))
    if product := plan.tensor.product_of(layer, plan):
        rows, parts = product.y.local(rows, 1, plan.mesh.sizes)[0], degree(product.y.features, plan.mesh.sizes)
    return rows, spec.heads // parts, max(1, (spec.kv_heads or spec.heads) // parts)


def head_dim(plan: Plan) -> int:
    return plan.spec.qk_features // plan.spec.heads


def own_bytes(plan: Plan, attention: AttentionSpec) -> int:
    """Return the bytes of a rank that has all tokens of its samples; 0 where torch's attention computes them."""
    if not attention.own_scores or plan.context:
        return 0
    rows, heads, kv_heads = part_of(plan)
    queries, numel = rows * heads * head_dim(plan), 2 * rows * kv_heads * head_dim(plan)
    scores = tile_scores(attention, rows // plan.spec.seq * heads, plan.spec.seq, plan.spec.seq)
    return passing_bytes(plan, attention, (queries, numel, 0, numel), scores)


def passing_bytes(plan: Plan, attention: AttentionSpec, numels: tuple[int, int, int, int], scores: int) -> int:
    """Return the bytes of what passes by. numels: elements of queries, of own keys and values, of those of other ranks
    and of sums of gradients; scores: of the largest tile without a fused kernel."""
    queries, numel, blocks, sums = numels
    compute, accurate = BYTES[plan.precision.compute], BYTES[plan.precision.accurate]
    repeated = 3 * queries if numel < 2 * queries else 0  # heads, for the kernel
    in_tile = (SCORES + (attention.softcap is not None)) * accurate * scores
    return (blocks + repeated) * compute + (sums + queries) * accurate + in_tile


def tile_scores(attention: AttentionSpec, heads: int, length: int, seq: int) -> int:
    """Return the scores that are computed at once without a fused kernel, which a window or a soft cap excludes.

    heads: of all samples together; length: tokens of a tile; seq: of a sample.
    """
    window = attention.window if attention.window is not None and attention.window < seq else None
    if window is None and attention.softcap is None:
        return 0
    rows = min(ROWS, length)
    return heads * rows * (length if window is None else min(length, rows + window))
