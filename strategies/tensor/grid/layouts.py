"""Where each logical parameter lies on the axes of the grid. Torch-free."""

from __future__ import annotations

from parallelrun.layout import Layout
from parallelrun.model_spec import ParameterSpec
from parallelrun.plan.structure import Plan

from .axes import boundary_layout_of
from .products import product_of


def layout(parameter: ParameterSpec, plan: Plan) -> Layout:
    """Weights as their product holds them; biases as Y's features; norms and positions as the features between blocks.

    Partial over the axes whose ranks see other samples: the rows of what the parameter is added to or multiplied with,
    and 2.5d's depth. A parameter without a layer role (only at tp = 1) is whole.
    """
    found = _layout(parameter, plan)
    return Layout(found.dims, tuple(axis for axis in found.partial if plan.mesh.size(axis) > 1))


def _layout(parameter: ParameterSpec, plan: Plan) -> Layout:
    product = product_of(plan.spec.layer_of[parameter.name], plan)
    if product is not None:
        return product.weight_layout if len(parameter.shape) == 2 else product.bias_layout
    if parameter.layer_role in ("norm", "position_embedding"):
        lies = boundary_layout_of(plan)
        return Layout((*((),) * (len(parameter.shape) - 1), lies.features), lies.rows)
    return Layout.replicated(len(parameter.shape))
