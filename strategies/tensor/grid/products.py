"""Which product each layer computes, and how what it reads lies. Torch-free; what the runtime and the account share."""

from __future__ import annotations

from parallelrun import product as products
from parallelrun.model_spec import LayerSpec, Pair
from parallelrun.plan.structure import Plan
from parallelrun.product import ActivationLayout, Move, Product

from .axes import boundary_layout_of
from .choose import key_of, pair_products


def product_of(layer: LayerSpec, plan: Plan) -> Product | None:
    """The product of a columns, row, linear, head or embedding layer (a lookup); None for any other."""
    lies_outside = boundary_layout_of(plan)
    if layer.layer_role in ("column_parallel", "row_parallel"):
        columns, row = of_pair(plan.spec.pair_of[layer.name], plan)
        return columns if layer.layer_role == "column_parallel" else row
    if layer.layer_role == "linear":
        return products.stationary_y(lies_outside)
    if layer.layer_role == "head":
        return head(plan.tensor.kind, lies_outside)
    if layer.layer_role == "embedding":
        return table(plan.tensor.kind, lies_outside)
    return None


def of_pair(pair: Pair, plan: Plan) -> tuple[Product, Product]:
    """(product of the column layers, of the row layer) by the forms that the plan has settled."""
    wanted = key_of(pair)
    forms = next(forms for key, forms in plan.tensor.forms if key == wanted)
    return pair_products(forms, boundary_layout_of(plan))


def head(kind: str, lies_outside: ActivationLayout) -> Product:
    """Hidden states -> logits, split over the vocabulary."""
    return products.cube(lies_outside) if kind == "3d" else products.stationary_y(lies_outside)


def table(kind: str, lies_outside: ActivationLayout) -> Product:
    """Token ids -> hidden states, from a table that lies as the head's weight does."""
    weight = head(kind, lies_outside)
    scatter = Move("rows", lies_outside.rows[-1]) if kind == "3d" else Move("features", lies_outside.features[-1])
    return products.lookup(lies_outside, weight.weight, weight.gather_w, scatter)


def activation_layout(layer: LayerSpec, plan: Plan) -> ActivationLayout:
    """How the input of a position, norm, dropout or attention layer lies: as inside its pair, else as between blocks.

    Of a layer that multiplies: how its product reads it.
    """
    product = product_of(layer, plan)
    if product is not None:
        return product.x
    pair = plan.spec.pair_of.get(layer.name)
    return of_pair(pair, plan)[0].y if pair else boundary_layout_of(plan)
