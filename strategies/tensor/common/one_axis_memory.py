"""What layers save for backward and need in backward, where at most one axis splits their features. Torch-free.

The formulas of Megatron's strategy, and of every strategy at tp=1. Saved tensors are counted per storage, as autograd
keeps them: once, however many nodes save them. R are the rows of a microbatch (samples x sequence), r those of a rank
between blocks (a slice of the sequence under sequence parallelism, else R), h the hidden size; features are local ones.

    layer          saved by forward                               in backward: gradients read and given, scratch
    norm           its input r h and its statistics               r h, r h
    column, head   its input r h (nodes of their own under        outputs R f, r h; sequence parallelism gathers the
                   sequence parallelism: the gathered R h)        input again and splits the whole input gradient
    attention      q, k, v and one statistic per row and head     R q, then q, k and v's gradients
    activation     what it reads; swiglu also silu(gate)          R f (swiglu: both factors), R f
    row            its input R f                                  r h (sequence parallelism: gathered, R h), R f
    linear         its input and what the activation reads        as a head
    dropout        a byte per element
    loss           the logits and two numbers per row             see `activation_memory.loss_backward`

Beside a branch waits the gradient that goes past it: r h. Weights rounded to the compute dtype are rounded again in
backward rather than kept. Recompute `selective` leaves out what norms and activations give; backward brings it back.
"""

from __future__ import annotations

from parallelrun.model_spec import BlockSpec, LayerSpec
from parallelrun.plan.structure import Plan
from parallelrun.plan.tensor_strategy import LayerBackward
from parallelrun.precision import BYTES

from . import expert_memory
from .activation_memory import (
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
    weight_gradients,
)
from .product_strategy import AXIS, num_rows, overlaps


def layer_backward(layer: LayerSpec, block: BlockSpec, plan: Plan) -> tuple[LayerBackward, ...]:
    """Return what backward through one layer needs; a column layer's second part is what reads its output."""
    compute, rows = BYTES[plan.precision.compute], num_rows(plan)
    kept, own = _saved(layer, block, plan), sum(weight_gradients(layer, plan))
    whole, between = rows * plan.spec.hidden * compute, _local_rows(plan) * plan.spec.hidden * compute
    waiting = residual_bytes(block, between)
    if layer.layer_role == "row_parallel":
        inside = rows * -(-layer.in_features // plan.mesh.size(AXIS)) * compute
        gathered = whole if plan.tensor.sequence_parallel else 0
        again = inside if not follows_attention(layer, block) and activates_again(block, plan) else 0
        return (LayerBackward(kept, waiting + gathered, inside, again, own, gathered or between),)
    if layer.layer_role not in ("column_parallel", "head", "linear"):
        norm = between if layer.layer_role == "norm" else 0
        return (LayerBackward(kept, waiting + between, norm, 0, own, norm),)
    outputs = rows * _local_outputs(layer, plan) * compute
    scratch = 0
    if plan.tensor.sequence_parallel:  # over gloo, our reduce-scatter receives as much as it sends
        overlapped = layer.layer_role != "linear" and plan.mesh.size(AXIS) > 1 and overlaps(plan)
        scratch = (2 if plan.device == "cpu" else 1) * whole + (2 * whole if overlapped else whole)
    if plan.recompute == "selective" and block.is_recomputed and layer.layer_role == "column_parallel":
        scratch += between
    product = LayerBackward(kept, waiting + outputs, between, scratch, own, outputs)
    mixed = rows * plan.spec.hidden // plan.mesh.size(AXIS) * compute
    return (product, *second_backward(layer, plan, waiting, outputs, mixed))


def _local_rows(plan: Plan) -> int:
    return num_rows(plan) // (plan.mesh.size(AXIS) if plan.tensor.sequence_parallel else 1)


def _saved(layer: LayerSpec, block: BlockSpec, plan: Plan) -> int:
    compute, role, rows = BYTES[plan.precision.compute], layer.layer_role, num_rows(plan)
    recomputed = plan.recompute == "selective" and block.is_recomputed
    if role == "norm":
        return norm_bytes(_local_rows(plan), layer, plan, recomputed)
    if role in ("column_parallel", "head"):
        outputs = 0 if role == "head" else _behind(layer, plan)
        if plan.tensor.sequence_parallel and not overlaps(plan):
            return rows * layer.in_features * compute + outputs  # gathered by a node of its own: another tensor
        return (0 if recomputed else _local_rows(plan) * layer.in_features * compute) + outputs
    if role == "linear":  # its input, and its output as the activation's input
        return _local_rows(plan) * (layer.in_features + layer.out_features) * compute
    if role == "row_parallel":
        dropped = not follows_attention(layer, block) and activates_again(block, plan)
        return 0 if dropped else rows * -(-layer.in_features // plan.mesh.size(AXIS)) * compute
    if role == "router":
        return expert_memory.input_bytes(block, plan) + expert_memory.routing_bytes(plan)
    if role == "expert":
        return expert_memory.rows_bytes(layer, block, plan)
    if role == "dropout":
        return _local_rows(plan) * layer.out_features * MASK if plan.dropout > 0 else 0
    if role == "embedding":
        return rows * (INDEX + (MASK if plan.mesh.size(AXIS) > 1 else 0))
    return 0


def _behind(layer: LayerSpec, plan: Plan) -> int:
    """What stands between a column and a row layer: attention or an activation."""
    outputs = _local_outputs(layer, plan)
    if attends(layer):
        return attention_bytes(num_rows(plan), plan.spec.heads // plan.mesh.size(AXIS), outputs, plan)
    return activation_bytes(num_rows(plan), outputs, layer, plan)


def _local_outputs(layer: LayerSpec, plan: Plan) -> int:
    """Features of all outputs together, on one rank."""
    known = plan.spec.parameters
    weights = layer.parameters or ((known[layer.tied],) if layer.tied else ())
    return sum(local_numel(weight, plan) // weight.shape[1] for weight in weights if len(weight.shape) == 2)
