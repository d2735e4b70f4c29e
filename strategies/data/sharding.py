"""What the ways that split every parameter over its copies (zero1, zero2, fsdp) have in common. Torch-free."""

from __future__ import annotations

from math import prod

from parallelrun.errors import Problem
from parallelrun.layout import Layout
from parallelrun.model_spec import ParameterSpec
from parallelrun.plan.request import Request
from parallelrun.plan.structure import Plan


def shard_dim(parameter: ParameterSpec, tensor_layout: Layout, axis: str, plan: Plan) -> int:
    """The dim along which `axis` splits a parameter that lies as `tensor_layout` says: 0, padded where it is uneven.

    Of experts 1 (the rows of each one's matrix), where a rank holds too few of them to be dealt out evenly, which
    padding would multiply, and where dim 1 is even: FSDP2 splits no other dim than 0 unevenly. torchtitan's rule.
    """
    if parameter.layer_role != "expert":
        return 0
    num_copies = plan.mesh.size(axis)
    experts, rows = (prod(plan.mesh.size(name) for name in axes) for axes in tensor_layout.dims[:2])
    is_even = parameter.shape[0] // experts % num_copies == 0  # ep divides the experts
    return 0 if is_even or parameter.shape[1] % (rows * num_copies) else 1


def shard_layout(parameter: ParameterSpec, tensor_layout: Layout, axis: str, plan: Plan) -> Layout:
    """The part of a parameter that one of its copies over `axis` updates."""
    if plan.mesh.size(axis) == 1:
        return tensor_layout
    return tensor_layout.split(shard_dim(parameter, tensor_layout, axis, plan), axis)


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
