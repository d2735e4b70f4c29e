"""Bytes that a microbatch of a block keeps for backward on a rank because rows travel. Torch-free.

The tensor way counts a layer whose experts are all at home: the rows that experts read, what is inside them, and what
they give. Here is what there is beyond that: rows of empty places, and the numbers by which rows are sorted on arrival.
"""

from __future__ import annotations

from parallelrun.models.spec import BlockSpec, LayerSpec
from parallelrun.plan.structure import Plan
from parallelrun.precision import BYTES

from .traffic import Rows, kept_rows

INT64_BYTES = 8
INDICES = 2  # of each row that is sorted: where it comes from, where it goes


def saved_bytes(block: BlockSpec, plan: Plan, loads: tuple[Rows, ...], num_sorts: int) -> int:
    """loads: `Way.loads`, of an even load. num_sorts: how often rows are sorted on their way."""
    if plan.recompute == "full" and block.is_recomputed:
        return 0
    at_home, here = kept_rows(plan)[0].even, loads[-1].even
    experts = [layer for layer in block.layers if layer.layer_role == "expert"]
    empty = sum((here - at_home) * _row_bytes(layer, block, plan) for layer in experts)
    return empty + len(experts) * num_sorts * here * INDICES * INT64_BYTES


def _row_bytes(layer: LayerSpec, block: BlockSpec, plan: Plan) -> int:
    """What one row keeps: itself, the inside of its expert, and what that gives."""
    inside = layer.parameters[0].shape[1] // plan.mesh.size("tp")
    gated = plan.spec.activation == "swiglu"
    opened = 3 if gated else 1  # swiglu: gate, silu(gate), up
    activated = 0 if plan.recompute == "selective" and block.is_recomputed else 1
    return (2 * plan.spec.hidden + (opened + activated) * inside) * BYTES[plan.precision.compute]
