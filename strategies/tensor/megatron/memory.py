"""Bytes that a microbatch of a block keeps for backward. Torch-free."""

from __future__ import annotations

from parallelrun.models.spec import BlockSpec
from parallelrun.plan.structure import Plan


def saved_bytes(block: BlockSpec, plan: Plan) -> int:
    return 0
