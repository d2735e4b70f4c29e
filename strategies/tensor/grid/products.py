"""How layers multiply on a grid, and how activations and parameters are split there. Torch-free.

The runtime and the predictions read these same products.
"""

from __future__ import annotations

from parallelrun import product as products
from parallelrun.layout import Layout
from parallelrun.model_spec import LayerSpec, Pair, ParameterSpec
from parallelrun.plan.structure import Plan
from parallelrun.product import ActivationLayout, Move, Product

from .choose import boundary_layout, key_of, pair_products


def tensor_sizes(plan: Plan) -> dict[str, int]:
    """Return the degree of every tensor axis of a plan, in mesh order."""
    return {axis: plan.mesh.size(axis) for axis in plan.mesh.mesh_dims_of("tp")}


def plan_boundary(plan: Plan) -> ActivationLayout:
    """Return the layout of activations between the blocks of a plan."""
    return boundary_layout(tensor_sizes(plan))


def product_of(layer: LayerSpec, plan: Plan) -> Product | None:
    """Return the product of a column, row, linear, head or embedding layer (a lookup); None for any other."""
    boundary = plan_boundary(plan)
    if layer.layer_role in ("column_parallel", "row_parallel"):
        columns, row = of_pair(plan.spec.pair_of[layer.name], plan)
        return columns if layer.layer_role == "column_parallel" else row
    if layer.layer_role == "linear":
        return products.stationary_y(boundary)
    if layer.layer_role == "head":
        return head(plan.tensor.kind, boundary)
    if layer.layer_role == "embedding":
        return table(plan.tensor.kind, boundary)
    return None


def of_pair(pair: Pair, plan: Plan) -> tuple[Product, Product]:
    """Return (product of the column layers, of the row layer) in the forms that the plan has chosen."""
    wanted = key_of(pair)
    forms = next(forms for key, forms in plan.tensor.forms if key == wanted)
    return pair_products(forms, plan_boundary(plan))


def head(kind: str, boundary: ActivationLayout) -> Product:
    """Return the product of hidden states -> logits, split over the vocabulary."""
    return products.cube(boundary) if kind == "3d" else products.stationary_y(boundary)


def table(kind: str, boundary: ActivationLayout) -> Product:
    """Return the lookup of token ids -> hidden states, from a table that is split as the head's weight."""
    weight = head(kind, boundary)
    scatter = Move("rows", boundary.rows[-1]) if kind == "3d" else Move("features", boundary.features[-1])
    return products.lookup(boundary, weight.weight, weight.gather_w, scatter)


def activation_layout(layer: LayerSpec, plan: Plan) -> ActivationLayout:
    """Return the layout of a layer's input: as its product reads it; of a position, norm, dropout or attention layer as
    inside its pair, else as between blocks."""
    product = product_of(layer, plan)
    if product is not None:
        return product.x
    pair = plan.spec.pair_of.get(layer.name)
    return of_pair(pair, plan)[0].y if pair else plan_boundary(plan)


def parameter_layout(parameter: ParameterSpec, plan: Plan) -> Layout:
    """Return the layout of a weight as its product holds it, of a bias as Y's features, of norms and positions as the
    features between blocks.

    Partial over the axes whose ranks see other samples: the rows of what the parameter is added to or multiplied with,
    and 2.5d's depth. A parameter without a layer role (only at tp=1) is replicated.
    """
    product, num_dims = product_of(plan.spec.layer_of[parameter.name], plan), len(parameter.shape)
    if product is not None:
        found = product.weight_layout if num_dims == 2 else product.bias_layout
    elif parameter.layer_role in ("norm", "position_embedding"):
        boundary = plan_boundary(plan)
        found = Layout((*((),) * (num_dims - 1), boundary.features), boundary.rows)
    else:
        found = Layout.replicated(num_dims)
    return Layout(found.dims, tuple(axis for axis in found.partial if plan.mesh.size(axis) > 1))
