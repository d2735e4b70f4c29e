"""Bytes that one microbatch of a block keeps for backward, from what our layers save. Torch-free.

Counted per storage, as autograd keeps them: once, however many nodes save it. R are the rows of a microbatch
(samples x sequence), r those of a slice under sequence parallel (else R); features of split tensors are local ones.

    norm           its input r h, its statistics; its output is kept by the columns behind it. RMSNorm written out in
                   torch keeps the scaled input too
    columns, head  its input r h (nodes of their own under sequence parallel: the gathered R h)
    attention      q, k, v and one statistic per row and head (written out, with dropout: probabilities, mask, product)
    activation     what it reads; swiglu also silu(gate)
    row            its input R in
    linear         its input, what the activation behind it reads (bert's head)
    dropout        a byte per element
    experts        see `expert_memory`
    loss           the logits and two numbers a row (one device: log-probabilities in the accurate dtype)

Weights rounded to the compute dtype are rounded again in backward rather than kept (`models.rounding`).
Recompute `selective` leaves out what norms and activations give; `full` keeps a block's input and nothing else.
"""

from __future__ import annotations

from math import prod

from parallelrun.model_spec import SAMPLE_SET_ROLE, BlockSpec, LayerSpec
from parallelrun.plan.structure import Plan
from parallelrun.plan.tensor_strategy import LayerBackward
from parallelrun.precision import BYTES

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
from . import backward, expert_memory
from .layouts import AXIS, largest, row_range
from .traffic import overlaps, rows


def saved_bytes(block: BlockSpec, plan: Plan) -> int:
    """Bytes on the rank that keeps most, for one microbatch of `block` under plan.recompute.

    What a model says of itself (`saved_elements`) is taken instead for images, and where it has no role layers.
    """
    compute = BYTES[plan.precision.compute]
    if plan.spec.kind == "images" or all(layer.layer_role in ("", SAMPLE_SET_ROLE) for layer in block.layers):
        kept = block.saved_elements or 0
        if plan.recompute == "full" and block.is_recomputed and block.input_shape is not None:
            kept = prod(block.input_shape)
        return round(kept * plan.batch.micro_batch * compute)
    if plan.recompute == "full" and block.is_recomputed:
        return _local_rows(plan) * plan.spec.hidden * compute
    return sum(one.kept for one in layer_backwards(block, plan))


def layer_backwards(block: BlockSpec, plan: Plan) -> tuple[LayerBackward, ...]:
    """The layers of `block` in its backward pass, in forward order, the loss behind the last."""
    if plan.spec.kind == "images" or all(layer.layer_role in ("", SAMPLE_SET_ROLE) for layer in block.layers):
        return _own_passes(block, plan)
    found = [one for layer in block.layers for one in backward.of_layer(layer, block, plan, _layer(layer, block, plan))]
    return (*found, *([backward.of_loss(plan, _loss(plan))] if block == plan.spec.blocks[-1] else []))


def _own_passes(block: BlockSpec, plan: Plan) -> tuple[LayerBackward, ...]:
    return (
        LayerBackward(kept=round((block.saved_elements or 0) * plan.batch.micro_batch * BYTES[plan.precision.compute])),
    )


def _local_rows(plan: Plan) -> int:
    return rows(plan) // (plan.mesh.size(AXIS) if plan.tensor.sequence_parallel else 1)


def _layer(layer: LayerSpec, block: BlockSpec, plan: Plan) -> int:
    compute = BYTES[plan.precision.compute]
    if layer.layer_role == "norm":
        again = plan.recompute == "selective" and block.is_recomputed
        return norm_bytes(_local_rows(plan), layer, plan, again)
    if layer.layer_role in ("column_parallel", "head"):
        return _columns_input(layer, block, plan) + _behind(layer, plan)
    if layer.layer_role == "linear":  # its input, and its output as the activation's input
        return _local_rows(plan) * (layer.in_features + layer.out_features) * compute
    if layer.layer_role == "row_parallel":
        dropped = not follows_attention(layer, block) and activates_again(block, plan)
        return 0 if dropped else rows(plan) * -(-layer.in_features // plan.mesh.size(AXIS)) * compute
    if layer.layer_role == "router":
        return expert_memory.input_bytes(block, plan) + expert_memory.routing_bytes(plan)
    if layer.layer_role == "expert":
        return expert_memory.rows_bytes(layer, block, plan)
    if layer.layer_role == "dropout":
        return _local_rows(plan) * layer.out_features * MASK if plan.dropout > 0 else 0
    if layer.layer_role == "embedding":
        return rows(plan) * (INDEX + (MASK if plan.mesh.size(AXIS) > 1 else 0))
    return 0


def _columns_input(layer: LayerSpec, block: BlockSpec, plan: Plan) -> int:
    """The norm's output, unless it is computed again; gathered by a node of its own, it is another tensor."""
    compute = BYTES[plan.precision.compute]
    if plan.tensor.sequence_parallel and not overlaps(plan):
        return rows(plan) * layer.in_features * compute
    if plan.recompute == "selective" and block.is_recomputed:
        return 0
    return _local_rows(plan) * layer.in_features * compute


def _behind(layer: LayerSpec, plan: Plan) -> int:
    """What stands between a column and a row layer; nothing does behind a head."""
    if layer.layer_role == "head":
        return 0
    outputs = _local_outputs(layer, plan)
    if attends(layer):
        return attention_bytes(rows(plan), plan.spec.heads // plan.mesh.size(AXIS), outputs, plan)
    return activation_bytes(rows(plan), outputs, layer, plan)


def _local_outputs(layer: LayerSpec, plan: Plan) -> int:
    """Features of all outputs together, on one rank."""
    return sum(largest(weight, plan) // weight.shape[1] for weight in layer.parameters if len(weight.shape) == 2)


def _loss(plan: Plan) -> int:
    targets, accurate = plan.batch.micro_batch * plan.spec.targets_per_sample, BYTES[plan.precision.accurate]
    if plan.mesh.size(AXIS) == 1:
        return targets * (plan.spec.vocab * accurate + INDEX)
    start, stop = row_range(plan.spec.vocab, plan, {})
    return targets * ((stop - start) * BYTES[plan.precision.compute] + accurate + INDEX)
