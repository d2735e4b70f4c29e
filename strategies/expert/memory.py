"""Bytes that a microbatch of a block keeps for backward on a rank because rows travel. Torch-free.

The tensor strategy counts a layer whose experts are all at home: the rows that experts read, what is inside them, what
they
give, and where rows come from. Here is what an expert dispatcher keeps beyond that, of an even load: rows of empty
places, and
the numbers by which rows are put into places or sorted on arrival.
"""

from __future__ import annotations

from parallelrun.model_spec import BlockSpec, LayerSpec
from parallelrun.models.moe.spec import inside_dim
from parallelrun.plan.structure import Plan
from parallelrun.precision import BYTES

from .traffic import Rows, kept_rows, num_assignments

INDEX, FLAG = 8, 1  # bytes of a number of a row, and of kept or dropped


def saved_bytes(block: BlockSpec, plan: Plan, loads: tuple[Rows, ...], index_bytes: int) -> int:
    """loads: `Way.loads`. index_bytes: of a layer, beyond those of rows that stay at home."""
    if plan.recompute == "full" and block.is_recomputed:
        return 0
    extra = loads[-1].even - num_at_home(plan)
    experts = [layer for layer in block.layers if layer.layer_role == "expert"]
    return sum(extra * _row_bytes(layer, block, plan) + index_bytes for layer in experts)


def num_at_home(plan: Plan) -> int:
    """Rows of a microbatch without an expert dispatcher: the kept assignments of an even load."""
    return kept_rows(plan)[0].even


def placing_bytes(num_places: int, plan: Plan) -> int:
    """Index bytes of rows in places: the token, the assignment and the weight of each, as of rows at home, and whether
    each assignment was kept."""
    empty = num_places - num_at_home(plan)
    return empty * (2 * INDEX + BYTES[plan.precision.compute]) + num_assignments(plan) * FLAG


def sorting_bytes(num_rows: int) -> int:
    """Index bytes of rows that are sorted: where each comes from and where it goes."""
    return 2 * num_rows * INDEX


def _row_bytes(layer: LayerSpec, block: BlockSpec, plan: Plan) -> int:
    """What one row keeps: itself, the inside of its expert, and what that gives."""
    weight = layer.parameters[0]
    inside = weight.shape[inside_dim(weight)] // plan.mesh.size("tp")
    opened = {"swiglu": 3, "relu": 0}.get(plan.spec.activation, 1)  # gate, silu(gate), up; relu keeps what it gives
    activated = 0 if plan.recompute == "selective" and block.is_recomputed and opened else 1
    return (2 * plan.spec.hidden + (opened + activated) * inside) * BYTES[plan.precision.compute]
