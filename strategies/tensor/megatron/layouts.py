"""Where each logical parameter lies on the tensor axes. Torch-free."""

from __future__ import annotations

from parallelrun.layout import Layout
from parallelrun.model_spec import ParameterSpec
from parallelrun.models.moe.spec import inside_dim
from parallelrun.plan.structure import Plan

AXIS, KV_AXIS, COPY_AXIS = "tp", "tp_kv", "tp_copy"


def layout(parameter: ParameterSpec, plan: Plan) -> Layout:
    """Columns, embedding and head by rows of dim 0; row weights by dim 1; experts by their inside; the rest whole on
    every rank.

    Partial over tp: gradients that come from a slice of the sequence, and a router's, whose weights are multiplied by
    what a slice of every expert gives. Partial over tp_copy: copies of a kv head, each of which serves its own query
    heads.
    """
    whole = Layout.replicated(len(parameter.shape))
    axes = plan.mesh.mesh_dims_of(AXIS)
    if parameter.layer_role == "row_parallel" and len(parameter.shape) == 2:
        return Layout(((), axes))
    if parameter.layer_role in ("column_parallel", "embedding", "head"):
        if plan.mesh.size(COPY_AXIS) > 1 and parameter.heads == plan.mesh.size(KV_AXIS):
            return Layout(((KV_AXIS,), *whole.dims[1:]), (COPY_AXIS,))
        return Layout((axes, *whole.dims[1:]))
    if parameter.layer_role == "expert":
        return Layout(tuple(axes if dim == inside_dim(parameter) else () for dim in range(len(parameter.shape))))
    if parameter.layer_role == "router":
        summed = plan.mesh.size(AXIS) > 1 and not parameter.frozen
        return Layout(whole.dims, (AXIS,)) if summed else whole
    return Layout(whole.dims, (AXIS,)) if plan.tensor.sequence_parallel else whole


def largest(parameter: ParameterSpec, plan: Plan) -> int:
    """Elements of the largest part of a parameter that a rank holds: `torch.chunk` makes the first parts largest."""
    return layout(parameter, plan).local_numel(parameter.shape, plan.mesh.sizes, {})


def row_range(num_rows: int, plan: Plan, coordinate: dict[str, int]) -> tuple[int, int]:
    """[start, stop) of the rows held at `coordinate` of a vocabulary of that many (embedding, head)."""
    return Layout((plan.mesh.mesh_dims_of(AXIS),)).ranges((num_rows,), plan.mesh.sizes, coordinate)[0]
