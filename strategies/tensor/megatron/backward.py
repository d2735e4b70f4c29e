"""Bytes that backward through one layer needs beside what forward has saved, on a rank, of one microbatch. Torch-free.

R h: what passes between layers; r h its slice under sequence parallel; f, q: features inside of the MLP and attention.

    residual       the gradient that goes past a branch waits while the branch's layers compute: r h
    row            reads that same gradient (sequence parallel: gathered, R h), gives R f; its weights' gradient
    activation     R f in and out; swiglu: of both its factors at once
    attention      reads R q, gives q, k and v's gradients
    columns        reads R f, gives r h; their weights' gradients. One node under tensor parallelism computes all of
                   them before any is added up; under sequence parallel it gathers its input again, and cuts the whole
                   input gradient for the reduce-scatter
    loss           reads and gives a gradient of all logits, in the accurate dtype; rounded again where logits are
    selective      what is computed again in backward is there while it is read: the norm's output, the activation's
"""

from __future__ import annotations

from parallelrun.model_spec import BlockSpec, LayerSpec
from parallelrun.plan.structure import Plan
from parallelrun.plan.tensor_strategy import LayerBackward
from parallelrun.precision import BYTES

from ..common.activation_memory import activates_again, attends, follows_attention
from .layouts import AXIS, largest, row_range
from .traffic import overlaps, rows

RESIDUAL_KINDS = ("transformer", "mlp")


def of_layer(layer: LayerSpec, block: BlockSpec, plan: Plan, kept: int) -> tuple[LayerBackward, ...]:
    """The passes of one layer, in forward order. kept: what forward saves of it, all in the first of them."""
    compute = BYTES[plan.precision.compute]
    between = _local_rows(plan) * plan.spec.hidden * compute
    beside = between if block.kind in RESIDUAL_KINDS else 0
    own = weight_gradients(layer, plan)
    if layer.layer_role == "row_parallel":
        inside = rows(plan) * -(-layer.in_features // plan.mesh.size(AXIS)) * compute
        gathered = rows(plan) * plan.spec.hidden * compute if plan.tensor.sequence_parallel else 0
        again = inside if not follows_attention(layer, block) and activates_again(block, plan) else 0
        return (LayerBackward(kept, beside + gathered, inside, again, sum(own), gathered or between),)
    if layer.layer_role in ("column_parallel", "head", "linear"):
        return _columns(layer, block, plan, kept, between, beside)
    if layer.layer_role == "norm":
        return (LayerBackward(kept, beside + between, between, 0, sum(own), between),)
    return (LayerBackward(kept, beside + between, 0, 0, sum(own)),)


def _columns(
    layer: LayerSpec, block: BlockSpec, plan: Plan, kept: int, between: int, beside: int
) -> tuple[LayerBackward, ...]:
    compute = BYTES[plan.precision.compute]
    outputs = rows(plan) * _outputs(layer, plan) * compute
    whole = rows(plan) * plan.spec.hidden * compute
    overlapped = layer.layer_role != "linear" and plan.mesh.size(AXIS) > 1 and overlaps(plan)
    scratch = 0
    if plan.tensor.sequence_parallel:
        scratch = whole + on_cpu(plan, whole) + (2 * whole if overlapped else whole)
    if plan.recompute == "selective" and block.is_recomputed and layer.layer_role == "column_parallel":
        scratch += between
    product = LayerBackward(kept, beside + outputs, between, scratch, sum(weight_gradients(layer, plan)), outputs)
    if layer.layer_role in ("head", "linear"):
        return (product,)
    if attends(layer):
        mixed = rows(plan) * plan.spec.hidden // plan.mesh.size(AXIS) * compute
        return product, LayerBackward(0, beside + mixed, outputs)
    gated = plan.spec.activation == "swiglu" and len(layer.parameters) > 1
    return product, LayerBackward(0, beside + (outputs // 2 if gated else outputs), outputs)


def of_loss(plan: Plan, kept: int) -> LayerBackward:
    """Of the loss behind the head."""
    targets, accurate = plan.batch.micro_batch * plan.spec.targets_per_sample, BYTES[plan.precision.accurate]
    if plan.mesh.size(AXIS) == 1:
        logits = targets * plan.spec.vocab * accurate
        return LayerBackward(kept, logits, logits)
    start, stop = row_range(plan.spec.vocab, plan, {})
    rounds = BYTES[plan.precision.compute] if plan.precision.compute != plan.precision.accurate else 0
    return LayerBackward(kept, 0, targets * (stop - start) * (2 * accurate + rounds))


def weight_gradients(layer: LayerSpec, plan: Plan) -> list[int]:
    """Bytes of the gradient of each of a layer's weights, as backward leaves them."""
    known = plan.spec.parameters
    weights = layer.parameters or ((known[layer.tied],) if layer.tied else ())
    ep = plan.mesh.size("ep") if layer.layer_role == "expert" else 1
    return [largest(weight, plan) // ep * BYTES[plan.precision.stored] for weight in weights if not weight.frozen]


def on_cpu(plan: Plan, size: int) -> int:
    """Our reduce-scatter over gloo exchanges parts of `size` bytes in all and sums them: it receives as much."""
    return size if plan.device == "cpu" else 0


def _local_rows(plan: Plan) -> int:
    return rows(plan) // (plan.mesh.size(AXIS) if plan.tensor.sequence_parallel else 1)


def _outputs(layer: LayerSpec, plan: Plan) -> int:
    """Features of all outputs together, on one rank."""
    known = plan.spec.parameters
    weights = layer.parameters or ((known[layer.tied],) if layer.tied else ())
    return sum(largest(weight, plan) // weight.shape[1] for weight in weights if len(weight.shape) == 2)
