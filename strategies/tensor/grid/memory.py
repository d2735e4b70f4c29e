"""Bytes that one microbatch of a block keeps for backward on a grid, from what our layers save. Torch-free.

Counted per storage, as autograd keeps them: once, however many nodes save it. r, f are a rank's rows and features where
the layer stands; gathered operands are kept under `save_gathered`, else the local ones (a local weight is a parameter).

    norm           its result before weights r f, one number a row
    products       X (r f, or gathered), W where it was gathered
    attention      q, k, v and one statistic per row and head; activation: what it reads
    dropout        a byte per element
    embedding      which rows of the table are read
    loss           the logits and two numbers a row

Every product's operands are split over all axes (3D: X r f = M K / l^3, W nothing besides the parameter), so without
gathered operands a layer keeps 1/l^3 of what one device does. Recompute `full` keeps a block's input and nothing else.
"""

from __future__ import annotations

from math import prod

from parallelrun.model_spec import BlockSpec, LayerSpec, ParameterSpec
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
    norm_bytes,
)
from ..megatron import backward
from ..megatron import memory as single_device
from . import layouts
from .axes import boundary_layout_of, degree
from .products import activation_layout, product_of
from .traffic import overlaps, rows


def saved_bytes(block: BlockSpec, plan: Plan) -> int:
    """Bytes on the rank that keeps most, for one microbatch of `block` under plan.recompute."""
    if plan.mesh.size("tp") == 1 or not any(layer.layer_role for layer in block.layers):
        return single_device.saved_bytes(block, plan)
    if plan.recompute == "full" and block.is_recomputed:
        return _elements(boundary_layout_of(plan), plan.spec.hidden, plan) * BYTES[plan.precision.compute]
    return sum(one.kept for one in layer_backwards(block, plan))


def layer_backwards(block: BlockSpec, plan: Plan) -> tuple[LayerBackward, ...]:
    """The layers of `block` in its backward pass, in forward order, the loss behind the last."""
    if plan.mesh.size("tp") == 1 or not any(layer.layer_role for layer in block.layers):
        return single_device.layer_backwards(block, plan)
    found = [one for layer in block.layers for one in _passes(layer, block, plan)]
    return (*found, *([_loss_pass(plan)] if block.name == plan.spec.blocks[-1].name else []))


def _passes(layer: LayerSpec, block: BlockSpec, plan: Plan) -> tuple[LayerBackward, ...]:
    """A product reads the gradient of Y and gives that of X, and holds what backward gathers and scatters meanwhile:
    over gloo a reduce-scatter receives as much as it sends. Panels go two at a time."""
    kept, compute = _layer(layer, block, plan), BYTES[plan.precision.compute]
    between = _elements(boundary_layout_of(plan), plan.spec.hidden, plan) * compute
    beside = between if block.kind in backward.RESIDUAL_KINDS else 0
    own = sum(_local_numel(weight, plan) for weight in layer.parameters) * BYTES[plan.precision.stored]
    product = product_of(layer, plan)
    if product is None or product.lookup:
        own_norm = between if layer.layer_role == "norm" else 0
        return (LayerBackward(kept, beside + between, own_norm, 0, own, own_norm),)
    reads = _elements(product.y, layer.out_features, plan) * compute
    gives = _elements(product.x, layer.in_features, plan) * compute
    first = LayerBackward(
        kept,
        beside if layer.layer_role == "row_parallel" else beside + reads,
        gives,
        _moved(layer, product, plan),
        own,
        reads,
    )
    if layer.layer_role != "column_parallel":
        return (first,)
    if attends(layer):
        return first, LayerBackward(0, beside + reads // 3, reads)
    gated = plan.spec.activation == "swiglu" and len(layer.parameters) > 1
    return first, LayerBackward(0, beside + (reads // 2 if gated else reads), reads)


def _moved(layer: LayerSpec, product: Product, plan: Plan) -> int:
    """Bytes of what a product's backward gathers and scatters."""
    sizes = plan.mesh.sizes
    moved = transfers(
        product, rows(plan), layer.in_features, layer.out_features, sizes, save_gathered=plan.tensor.save_gathered
    )
    parts = num_panels(product, sizes) if product.panels else 1
    total = 0
    for move in moved:
        if move.phase == "backward":
            dtype = plan.precision.reduce if move.operand == "dw" else plan.precision.compute
            times = 2 if move.operation == "reduce_scatter" and plan.device == "cpu" else 1
            total += times * BYTES[dtype] * move.elements * min(2, parts) // parts
    return total


def _local_numel(parameter: ParameterSpec, plan: Plan) -> int:
    return layouts.layout(parameter, plan).local_numel(parameter.shape, plan.mesh.sizes, {})


def _loss_pass(plan: Plan) -> LayerBackward:
    """The gradient of the logits on this rank, in the accurate dtype beside their copy in it, then rounded."""
    compute, accurate = BYTES[plan.precision.compute], BYTES[plan.precision.accurate]
    return LayerBackward(_loss(plan), 0, _logits(plan) * (2 * accurate + (compute if compute != accurate else 0)))


def _logits(plan: Plan) -> int:
    head = next((layer for layer in plan.spec.blocks[-1].layers if layer.layer_role == "head"), None)
    product = product_of(head, plan) if head else None
    targets = plan.batch.micro_batch * plan.spec.targets_per_sample
    return prod(product.y.local(targets, plan.spec.vocab, plan.mesh.sizes)) if product else targets * plan.spec.vocab


def _elements(activation: ActivationLayout, features: int, plan: Plan) -> int:
    return prod(activation.local(rows(plan), features, plan.mesh.sizes))


def _layer(layer: LayerSpec, block: BlockSpec, plan: Plan) -> int:
    if layer.layer_role == "norm":
        return _norm(layer, block, plan)
    if layer.layer_role == "dropout":
        return _elements(activation_layout(layer, plan), layer.out_features, plan) * MASK if plan.dropout > 0 else 0
    product = product_of(layer, plan)
    if product is None:
        return 0
    if product.lookup:
        num_rows, _ = product.x.local(rows(plan), layer.in_features, plan.mesh.sizes)
        return num_rows * INDEX
    return _input(layer, product, block, plan) + _weight(layer, product, plan) + _behind(layer, product, plan)


def _norm(layer: LayerSpec, block: BlockSpec, plan: Plan) -> int:
    activation, compute, accurate = (
        activation_layout(layer, plan),
        BYTES[plan.precision.compute],
        BYTES[plan.precision.accurate],
    )
    num_rows, features = activation.local(rows(plan), layer.in_features, plan.mesh.sizes)
    if features == layer.in_features:  # whole rows: the one-device norm
        return norm_bytes(num_rows, layer, plan, again=plan.recompute == "selective" and block.is_recomputed)
    return num_rows * (features * compute + accurate)


def _gathered(layer: LayerSpec, product: Product, plan: Plan) -> dict[str, int]:
    """Elements of the operands that forward gathers, and backward finds again."""
    if not plan.tensor.save_gathered:
        return {}
    moved = transfers(product, rows(plan), layer.in_features, layer.out_features, plan.mesh.sizes)
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
    """W, where it was gathered; nodes of their own keep it without padding."""
    gathered = _gathered(layer, product, plan).get("w", 0)  # of several axes the last gather, which makes the whole
    if overlaps(plan):
        return gathered * BYTES[plan.precision.compute]
    if gathered:
        shape = layer.out_features, layer.in_features
        real = product.gathered_weight.local_numel(shape, plan.mesh.sizes, {})
        return real * BYTES[plan.precision.compute]
    return 0


def _behind(layer: LayerSpec, product: Product, plan: Plan) -> int:
    """What stands between a column and a row layer, or behind a linear one: it reads this layer's output."""
    if layer.layer_role in ("head", "row_parallel"):
        return 0
    num_rows, outputs = product.y.local(rows(plan), layer.out_features, plan.mesh.sizes)
    if attends(layer):
        parts = degree(product.y.features, plan.mesh.sizes)
        shared = _turned(layer, plan) // parts if _share_storage(layer, product, plan) else 0
        own = attention_bytes(num_rows, plan.spec.heads // parts, outputs, plan)
        return own + num_rows * shared * BYTES[plan.precision.compute]
    return activation_bytes(num_rows, outputs, layer, plan)


def _share_storage(layer: LayerSpec, product: Product, plan: Plan) -> bool:
    """Are the outputs of a layer views of one buffer: what was scattered, or what one node wrote?"""
    has_bias = any(len(parameter.shape) == 1 for parameter in layer.parameters)
    scatters = product.scatter_y is not None and plan.mesh.size(product.scatter_y.axis) > 1
    return not has_bias and not product.panels and (scatters or overlaps(plan))


def _turned(layer: LayerSpec, plan: Plan) -> int:
    """Features of q and k where rotary positions turn them into other tensors: v's view keeps them all the same."""
    if any(x.layer_role == "position_embedding" for x in plan.spec.layers()):
        return 0
    return sum(parameter.shape[0] for parameter in layer.parameters[:-1] if len(parameter.shape) == 2)


def _loss(plan: Plan) -> int:
    """Of the logits on this rank. The targets are a part of those of the microbatch, which stay."""
    head = next((layer for layer in plan.spec.blocks[-1].layers if layer.layer_role == "head"), None)
    product = product_of(head, plan) if head else None
    targets = plan.batch.micro_batch * plan.spec.targets_per_sample
    accurate = BYTES[plan.precision.accurate]
    if product is None:
        return targets * (plan.spec.vocab * accurate + INDEX)
    own, vocab = product.y.local(targets, plan.spec.vocab, plan.mesh.sizes)
    return own * (vocab * BYTES[plan.precision.compute] + accurate) + targets * INDEX
