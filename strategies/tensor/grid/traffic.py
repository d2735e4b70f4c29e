"""Collectives of the grid tensor strategies in closed form: calls and payload bytes of one step on one rank.
Torch-free.

Per microbatch, everything that a layer's Product moves (`parallelrun.product.transfers`): operands and their gradients
in the compute dtype, gradients of weights in the dtype that gradients are reduced in. Besides, over the axis that
splits the features, r being a rank's rows:

    layernorm      all-gather of 2 numbers a row (mean, sum of squares about it); backward all-reduce of 2 r
    rmsnorm        all-reduce of r; backward all-reduce of r
    loss           all-reduce (max) of r, all-reduce of 2 r, both in the accurate dtype; backward nothing

Gradients of biases, norms, positions and, in 2.5D, of weights over depth are summed once per step: the data strategy's
rows.
"""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import NamedTuple

from parallelrun.model_spec import BlockSpec, LayerSpec
from parallelrun.plan.structure import Collective, Plan
from parallelrun.precision import BYTES
from parallelrun.product import Transfer, transfers

from ..common.traffic import Step, title
from .products import activation_layout, product_of

PURPOSES = {"w": "weights", "dw": "weight_gradients"}  # of operands; whatever else moves is an activation


class Call(NamedTuple):
    """`calls` collectives, `payload` bytes together."""

    axis: str
    operation: str
    purpose: str
    calls: int
    payload: int


def overlaps(plan: Plan) -> bool:
    """May one node move operands and multiply? Never under a split backward, which runs such a node twice.

    Only such a node can gather again in backward: asked for that, it is taken without `overlap` too.
    """
    return (plan.tensor.overlap or not plan.tensor.save_gathered) and not plan.pipeline.splits_backward


def rows(plan: Plan) -> int:
    """Positions of one microbatch of the whole replica: M of every product."""
    return plan.batch.micro_batch * prod(plan.spec.boundary_shape[:-1])


def collectives(blocks: tuple[BlockSpec, ...], plan: Plan) -> list[Collective]:
    """One rank's collectives over the tensor axes of one training step (all microbatches) for the blocks it holds."""
    if plan.mesh.size("tp") == 1:
        return []
    counts: Counter[tuple[str, str, str]] = Counter()
    payload: Counter[tuple[str, str, str]] = Counter()
    known: dict[object, list[Call]] = {}
    for block in blocks:
        looks = _looks(block, plan)
        if looks not in known:
            known[looks] = of_block(block, plan)
        for call in known[looks]:
            counts[call[:3]] += plan.batch.microbatches * call.calls
            payload[call[:3]] += plan.batch.microbatches * call.payload
    return [Collective(*key, calls=counts[key], payload_bytes=payload[key]) for key in sorted(counts)]


def _looks(block: BlockSpec, plan: Plan) -> object:
    """All that a block's traffic depends on."""
    layers = tuple(
        (x.layer_role, x.in_features, x.out_features, tuple(p.frozen for p in x.parameters)) for x in block.layers
    )
    return block.name == plan.spec.blocks[-1].name, _has_input_gradient(block.layers[0], plan), block.kind, layers


def of_block(block: BlockSpec, plan: Plan) -> list[Call]:
    """Everything that one microbatch of a block sends, forward and backward; of the last block the loss too."""
    return [Call(*step[1:]) for step in steps(block, plan)]


def steps(block: BlockSpec, plan: Plan) -> list[Step]:
    """The same in the order in which it is sent, each with its phase and layer."""
    both = [(layer, *_layer(layer, plan)) for layer in block.layers]
    found = [(title("forward", layer, block), call) for layer, calls, _ in both for call in calls]
    again = _again(block, [call for _, call in found], plan)
    if block.name == plan.spec.blocks[-1].name:
        found += [("loss", call) for call in _loss(plan)]
    found += [("forward again, to recompute", call) for call in again]
    found += [(title("backward", layer, block), call) for layer, _, calls in reversed(both) for call in calls]
    return [Step(name, *call) for name, call in found]


def _again(block: BlockSpec, forward: list[Call], plan: Plan) -> list[Call]:
    """What a recomputed block sends a second time: all, unless its last layer scatters in a node of its own, behind
    the last tensor that backward needs. Nothing goes back through a block whose gradients nobody wants."""
    trains = any(not p.frozen for p in block.parameters) or _has_input_gradient(block.layers[0], plan)
    if plan.recompute != "full" or not block.is_recomputed or not trains:
        return []
    last = next(x for x in reversed(block.layers) if x.layer_role != "dropout" or plan.dropout > 0)
    scatters = last.layer_role == "row_parallel" and any(m.operand == "y" for m in moves(last, plan))
    return forward[:-1] if scatters and not overlaps(plan) else forward


def moves(layer: LayerSpec, plan: Plan) -> list[Transfer]:
    """What one microbatch of a layer with a Product moves."""
    product = product_of(layer, plan)
    if product is None:
        return []
    weights = layer.parameters or ((plan.spec.parameters[layer.tied],) if layer.tied else ())
    wanted = _has_input_gradient(layer, plan), any(not p.frozen for p in weights if len(p.shape) == 2)
    found = transfers(
        product, rows(plan), layer.in_features, layer.out_features, plan.mesh.sizes,
        save_gathered=plan.tensor.save_gathered, input_gradient=wanted[0], weight_gradient=wanted[1],
    )  # fmt: skip
    runs_backward = wanted[1] or (wanted[0] and not product.lookup)
    return found if runs_backward else [move for move in found if move.phase == "forward"]


def _has_input_gradient(layer: LayerSpec, plan: Plan) -> bool:
    """Does anything before the layer train? The model's own input has no gradient, nor has what frozen layers give."""
    for before in plan.spec.layers():
        if before.name == layer.name:
            return False
        if any(not parameter.frozen for parameter in before.parameters):
            return True
    return False


def _layer(layer: LayerSpec, plan: Plan) -> tuple[list[Call], list[Call]]:
    """(what is sent forward, what backward)."""
    if layer.layer_role == "norm":
        forward, backward = _norm(layer, plan)
        return forward, backward if _has_input_gradient(layer, plan) else []
    phases: tuple[list[Call], list[Call]] = [], []
    for transfer in moves(layer, plan):
        phases[transfer.phase == "backward"].append(_call(transfer, plan))
    return phases


def _call(transfer: Transfer, plan: Plan) -> Call:
    purpose = PURPOSES.get(transfer.operand, "activations")
    dtype = plan.precision.reduce if transfer.operand == "dw" else plan.precision.compute
    size = transfer.calls * transfer.elements * BYTES[dtype]
    return Call(transfer.axis, transfer.operation, purpose, transfer.calls, size)


def _norm(layer: LayerSpec, plan: Plan) -> tuple[list[Call], list[Call]]:
    """Statistics of rows whose features are split."""
    activation = activation_layout(layer, plan)
    local_rows, _ = activation.local(rows(plan), layer.in_features, plan.mesh.sizes)
    size = local_rows * BYTES[plan.precision.accurate]
    split = [axis for axis in activation.features if plan.mesh.size(axis) > 1]
    if plan.spec.norm == "rmsnorm":
        forward = [Call(axis, "all_reduce", "norm", 1, size) for axis in split]
        return forward, forward
    return (
        [Call(axis, "all_gather", "norm", 1, plan.mesh.size(axis) * 2 * size) for axis in split],
        [Call(axis, "all_reduce", "norm", 1, 2 * size) for axis in split],
    )


def _loss(plan: Plan) -> list[Call]:
    """The largest logit, then both sums at once, over the axes that split the vocabulary."""
    head = next((layer for layer in plan.spec.blocks[-1].layers if layer.layer_role == "head"), None)
    product = product_of(head, plan) if head else None
    if product is None:
        return []
    targets = plan.batch.micro_batch * plan.spec.targets_per_sample
    size = product.y.local(targets, plan.spec.vocab, plan.mesh.sizes)[0] * BYTES[plan.precision.accurate]
    return [
        Call(axis, "all_reduce", "loss", 1, factor * size)
        for axis in product.y.features
        if plan.mesh.size(axis) > 1
        for factor in (1, 2)
    ]
