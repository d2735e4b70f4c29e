"""What layers save for backward and need in backward on a grid. Torch-free.

Counted per storage, as autograd keeps them: once, however many nodes save it. r, f are a rank's rows and features of
the layer; gathered operands are saved under `save_gathered`, else the local ones (a local weight is a parameter).

    norm           its result before weights r f, one number per row
    products       X (r f, or gathered), W where it was gathered
    attention      q, k, v and one statistic per row and head; activation: what it reads
    dropout        a byte per element
    embedding      which rows of the table are read
    loss           the logits and two numbers per row

Every product's operands are split over all axes (3D: X r f = M K / l^3, W nothing besides the parameter), so without
gathered operands a layer saves 1/l^3 of what one device does.
"""

from __future__ import annotations

from math import prod

from parallelrun.model_spec import BlockSpec, LayerSpec
from parallelrun.plan.structure import Plan
from parallelrun.plan.tensor_strategy import LayerBackward
from parallelrun.precision import BYTES
from parallelrun.product import ActivationLayout, Product, num_panels, transfers

from ..common.activation_memory import (
    INDEX,
    MASK,
    activates_again,
    activation_bytes,
    attends,
    attention_bytes,
    follows_attention,
    local_numel,
    norm_bytes,
    residual_bytes,
    second_backward,
)
from ..common.product_strategy import num_rows, overlaps
from .choose import degree
from .products import activation_layout, plan_boundary, product_of


def layer_backward(layer: LayerSpec, block: BlockSpec, plan: Plan) -> tuple[LayerBackward, ...]:
    """A product reads the gradient of Y and gives that of X, and holds what backward gathers and scatters meanwhile:
    over gloo a reduce-scatter receives as much as it sends. Panels go two at a time."""
    kept, compute = _saved(layer, block, plan), BYTES[plan.precision.compute]
    between = _elements(plan_boundary(plan), plan.spec.hidden, plan) * compute
    waiting = residual_bytes(block, between)
    own = sum(local_numel(weight, plan) for weight in layer.parameters) * BYTES[plan.precision.stored]
    product = product_of(layer, plan)
    if product is None or product.lookup:
        norm = between if layer.layer_role == "norm" else 0
        return (LayerBackward(kept, waiting + between, norm, 0, own, norm),)
    reads = _elements(product.y, layer.out_features, plan) * compute
    gives = _elements(product.x, layer.in_features, plan) * compute
    arriving = waiting if layer.layer_role == "row_parallel" else waiting + reads
    first = LayerBackward(kept, arriving, gives, _moved(layer, product, plan), own, reads)
    return (first, *second_backward(layer, plan, waiting, reads, reads // 3))


def _moved(layer: LayerSpec, product: Product, plan: Plan) -> int:
    """Bytes of what a product's backward gathers and scatters."""
    sizes, total = plan.mesh.sizes, 0
    shape = num_rows(plan), layer.in_features, layer.out_features
    parts = num_panels(product, sizes) if product.panels else 1
    for move in transfers(product, *shape, sizes, save_gathered=plan.tensor.save_gathered):
        if move.phase == "backward":
            dtype = plan.precision.reduce if move.operand == "dw" else plan.precision.compute
            times = 2 if move.operation == "reduce_scatter" and plan.device == "cpu" else 1
            total += times * BYTES[dtype] * move.elements * min(2, parts) // parts
    return total


def _elements(layout: ActivationLayout, features: int, plan: Plan) -> int:
    return prod(layout.local(num_rows(plan), features, plan.mesh.sizes))


def _saved(layer: LayerSpec, block: BlockSpec, plan: Plan) -> int:
    if layer.layer_role == "norm":
        return _norm(layer, block, plan)
    if layer.layer_role == "dropout":
        return _elements(activation_layout(layer, plan), layer.out_features, plan) * MASK if plan.dropout > 0 else 0
    product = product_of(layer, plan)
    if product is None:
        return 0
    if product.lookup:
        return product.x.local(num_rows(plan), layer.in_features, plan.mesh.sizes)[0] * INDEX
    return _input(layer, product, block, plan) + _weight(layer, product, plan) + _behind(layer, product, plan)


def _norm(layer: LayerSpec, block: BlockSpec, plan: Plan) -> int:
    rows, features = activation_layout(layer, plan).local(num_rows(plan), layer.in_features, plan.mesh.sizes)
    if features == layer.in_features:  # whole rows: the one-device norm
        return norm_bytes(rows, layer, plan, again=plan.recompute == "selective" and block.is_recomputed)
    return rows * (features * BYTES[plan.precision.compute] + BYTES[plan.precision.accurate])


def _gathered(layer: LayerSpec, product: Product, plan: Plan) -> dict[str, int]:
    """Elements of the operands that forward gathers and backward reads; of several gathers the last, the largest."""
    if not plan.tensor.save_gathered:
        return {}
    moved = transfers(product, num_rows(plan), layer.in_features, layer.out_features, plan.mesh.sizes)
    return {m.operand: m.elements for m in moved if m.phase == "forward" and m.operation == "all_gather"}


def _input(layer: LayerSpec, product: Product, block: BlockSpec, plan: Plan) -> int:
    """X: what the norm, attention or activation before it gave, or a gathered copy of that. Under `selective` an
    activation's result is computed again, a gathered one is not."""
    compute = BYTES[plan.precision.compute]
    gathered = _gathered(layer, product, plan).get("x", 0) * compute
    own = _elements(product.x, layer.in_features, plan) * compute
    attended = layer.layer_role == "row_parallel" and follows_attention(layer, block)
    activated = layer.layer_role == "row_parallel" and not attended
    if gathered:  # torch's attention keeps its result for itself, unless the row layer has read a copy; relu always
        kept = attended and not plan.spec.attention_dropout and plan.spec.kv_heads == plan.spec.heads
        kept |= activated and plan.spec.activation == "relu"
        return gathered + (own if kept else 0)
    return 0 if activated and activates_again(block, plan) else own


def _weight(layer: LayerSpec, product: Product, plan: Plan) -> int:
    """W, where it was gathered; nodes of their own save it without padding."""
    gathered, compute = _gathered(layer, product, plan).get("w", 0), BYTES[plan.precision.compute]
    if not gathered or overlaps(plan):
        return gathered * compute
    return product.gathered_weight.local_numel((layer.out_features, layer.in_features), plan.mesh.sizes, {}) * compute


def _behind(layer: LayerSpec, product: Product, plan: Plan) -> int:
    """What stands between a column and a row layer, or behind a linear one: it reads this layer's output."""
    if layer.layer_role in ("head", "row_parallel"):
        return 0
    rows, outputs = product.y.local(num_rows(plan), layer.out_features, plan.mesh.sizes)
    if not attends(layer):
        return activation_bytes(rows, outputs, layer, plan)
    parts = degree(product.y.features, plan.mesh.sizes)
    shared = _rotated(layer, plan) // parts if _share_storage(layer, product, plan) else 0
    own = attention_bytes(rows, plan.spec.heads // parts, outputs, plan)
    return own + rows * shared * BYTES[plan.precision.compute]


def _share_storage(layer: LayerSpec, product: Product, plan: Plan) -> bool:
    """Whether the outputs of a layer are views of one buffer: what was scattered, or what one node wrote."""
    has_bias = any(len(parameter.shape) == 1 for parameter in layer.parameters)
    scatters = product.scatter_y is not None and plan.mesh.size(product.scatter_y.axis) > 1
    return not has_bias and not product.panels and (scatters or overlaps(plan))


def _rotated(layer: LayerSpec, plan: Plan) -> int:
    """Features of q and k where rotary positions make other tensors of them: v's view keeps them all the same."""
    if any(x.layer_role == "position_embedding" for x in plan.spec.layers()):
        return 0
    return sum(parameter.shape[0] for parameter in layer.parameters[:-1] if len(parameter.shape) == 2)
