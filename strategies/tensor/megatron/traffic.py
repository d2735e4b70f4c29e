"""Collectives of the tensor strategy in closed form: calls and payload bytes of one step on one rank. Torch-free.

Per microbatch and layer, A being the activation (rows x features) in the compute dtype:

    layer            forward          backward                       forward        backward
                     (whole sequence)                                (sequence parallel)
    columns, head    -                all-reduce A                   all-gather A   [all-gather A] reduce-scatter A
    row, embedding   all-reduce A     -                              reduce-scatter A   all-gather A
    enter            -                all-reduce A                   all-gather A   reduce-scatter A
    leave            all-reduce A     -                              reduce-scatter A   all-gather A
    loss             all-reduce (max) n, all-reduce (sums) 2 n, in the accurate dtype; backward nothing

The bracketed gather is that of the overlapped node, which keeps the slice; nodes of their own keep the whole input.
"""

from __future__ import annotations

from collections import Counter
from math import prod

from parallelrun.model_spec import BlockSpec, LayerSpec
from parallelrun.plan.structure import Collective, Plan
from parallelrun.precision import BYTES

from ..common.traffic import Step, title

WHOLE = ("column_parallel", "head", "expert_input")  # roles of layers that read whole rows
SUMMED = ("row_parallel", "embedding", "expert_output")  # roles of layers that give a sum over ranks
Call = tuple[str, str, int]  # operation, purpose, payload bytes


def overlaps(plan: Plan) -> bool:
    """Does the input-gradient reduction share a node with the weight gradients? Never under a split backward."""
    return plan.tensor.overlap and not plan.pipeline.splits_backward


def rows(plan: Plan) -> int:
    """Positions of one microbatch: what every layer's features are multiplied by."""
    return plan.batch.micro_batch * prod(plan.spec.boundary_shape[:-1])


def collectives(blocks: tuple[BlockSpec, ...], plan: Plan) -> list[Collective]:
    """One rank's collectives over `tp` of one training step (all microbatches) for the blocks it holds."""
    if plan.mesh.size("tp") == 1:
        return []
    counts: Counter[tuple[str, str]] = Counter()
    payload: Counter[tuple[str, str]] = Counter()
    for step in (step for block in blocks for step in steps(block, plan)):
        counts[step.operation, step.purpose] += plan.batch.microbatches
        payload[step.operation, step.purpose] += plan.batch.microbatches * step.payload
    return [Collective("tp", *key, calls=counts[key], payload_bytes=payload[key]) for key in sorted(counts)]


def steps(block: BlockSpec, plan: Plan) -> list[Step]:
    """What one microbatch of a block sends, in order; of the last block the loss too."""
    forward = [(layer, call) for layer in block.layers for call in _forward(layer, plan)]
    found = [(title("forward", layer, block), call) for layer, call in forward]
    if block == plan.spec.blocks[-1]:
        found += [("loss", call) for call in _loss(plan)]
    found += [("forward again, to recompute", call) for call in _again(block, [call for _, call in forward], plan)]
    for layer in reversed(block.layers):
        found += [(title("backward", layer, block), call) for call in _backward(layer, plan)]
    return [Step(name, "tp", operation, purpose, 1, size) for name, (operation, purpose, size) in found]


def _activation(operation: str, features: int, plan: Plan) -> Call:
    return operation, "activations", rows(plan) * features * BYTES[plan.precision.compute]


def _forward(layer: LayerSpec, plan: Plan) -> list[Call]:
    sequence_parallel = plan.tensor.sequence_parallel
    if layer.layer_role in SUMMED:
        return [_activation("reduce_scatter" if sequence_parallel else "all_reduce", layer.out_features, plan)]
    if layer.layer_role in WHOLE and sequence_parallel:
        return [_activation("all_gather", layer.in_features, plan)]
    return []


def _backward(layer: LayerSpec, plan: Plan) -> list[Call]:
    sequence_parallel = plan.tensor.sequence_parallel
    if layer.layer_role in SUMMED:
        return [_activation("all_gather", layer.out_features, plan)] if sequence_parallel else []
    if layer.layer_role not in WHOLE or layer == plan.spec.blocks[0].layers[0]:
        return []  # the model's own input has no gradient
    if not sequence_parallel:
        return [_activation("all_reduce", layer.in_features, plan)]
    overlapped = (
        overlaps(plan) and layer.layer_role != "expert_input"
    )  # the router and the gather behind it are no such node
    again = [_activation("all_gather", layer.in_features, plan)] if overlapped else []
    return [*again, _activation("reduce_scatter", layer.in_features, plan)]


def _again(block: BlockSpec, forward: list[Call], plan: Plan) -> list[Call]:
    """What a recomputed block sends a second time. Recomputation stops at the last tensor that backward needs: the
    last reduction is behind it, unless a dropout mask comes after; a last gather (of a head in a recomputed block) is
    before the product that backward needs. What is beside experts runs before them, so that theirs is the last."""
    if plan.recompute != "full" or not block.is_recomputed:
        return []
    ends_in_sum = bool(forward) and forward[-1][0] != "all_gather"
    return forward[:-1] if ends_in_sum and plan.dropout == 0 else forward


def _loss(plan: Plan) -> list[Call]:
    """Only a split vocabulary needs any: the largest logit, then both sums at once."""
    if not any(layer.layer_role == "head" for layer in plan.spec.blocks[-1].layers):
        return []
    size = plan.batch.micro_batch * plan.spec.targets_per_sample * BYTES[plan.precision.accurate]
    return [("all_reduce", "loss", size), ("all_reduce", "loss", 2 * size)]
