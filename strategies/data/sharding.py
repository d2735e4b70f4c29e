"""What the ways that split dim 0 of every parameter (zero1, fsdp) have in common. Torch-free."""

from __future__ import annotations

from parallelrun.errors import Problem
from parallelrun.layout import Layout
from parallelrun.plan.expert_axes import replica_axis
from parallelrun.plan.structure import Plan
from parallelrun.plan.ways import Request


def shard_layout(tensor_layout: Layout, plan: Plan) -> Layout:
    """The part of a parameter that one of its copies updates: dim 0 is split by the axis over which the copies lie."""
    axis = replica_axis(tensor_layout, plan)
    return tensor_layout.split(0, axis) if plan.mesh.size(axis) > 1 else tensor_layout


def check_splits(request: Request, kind: str) -> list[Problem]:
    """A parameter without dims has no dim 0 to split."""
    if request.dp == 1:
        return []
    whole = kind == "zero1"  # what it does not update is never split
    scalars = [p.name for p in request.spec.parameters.values() if not p.shape and not (p.frozen and whole)]
    return [
        Problem(
            f"strategy.data.kind={kind} splits dim 0 of every parameter over dp={request.dp}, but {name} has no dims",
            where="strategy.data.kind",
            suggestion="strategy.data.kind=ddp, or give the parameter the shape (1,)",
            kind="not_built",
        )
        for name in scalars[:1]
    ]
