"""The bytes of a block that describes its backward pass operation by operation (`BlockBackward`)."""

from __future__ import annotations

from parallelrun.base.precision import BYTES
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.contract.tensor_strategy import LayerBackward
from parallelrun.planner.model.model_spec import BlockSpec, LayerSpec
from parallelrun.planner.model.model_spec.backward import BackwardStep, BlockBackward

from .activation_memory import INDEX, rounded_bytes


def step_backward(step: BackwardStep, layer: LayerSpec | None, weights: int, plan: Plan) -> LayerBackward:
    """The backward pass of one operation. layer: whose weights get gradients of that many bytes."""
    samples, precision, step = plan.batch.micro_batch, plan.precision, step.on_rank(plan.mesh.size("tp"))
    each, widened = samples * _element_bytes(step, plan), 0
    if layer is not None:
        widened = max((rounded_bytes([parameter], plan) for parameter in layer.parameters), default=0)
    scratch = max(0, step.giving - step.arriving) * each if step.sums else 0  # what arrived is freed before
    waiting = step.waiting * samples * BYTES[precision.compute]
    if step.waits_itself and each == samples * BYTES[precision.compute]:
        waiting = 0
    arriving, reads = step.arriving * each, step.arriving * each if weights else 0
    return LayerBackward(
        _kept(step, plan), waiting + arriving, step.giving * each, scratch, weights, reads, widened=widened
    )


def recomputed_bytes(backward: BlockBackward, plan: Plan) -> int:
    """Return what a second forward needs at its peak beside all that it saves, with the gradient that arrives: at a
    norm its result set by set and whole, or in both dtypes, and its input in the compute dtype; else a result."""
    compute, accurate = BYTES[plan.precision.compute], BYTES[plan.precision.accurate]
    sets, samples = plan.sample_sets, plan.batch.micro_batch
    results = accurate * (2 if sets is not None and not sets.spread and sets.size < samples else 1)
    norm = results if compute == accurate else max(results, accurate + compute) + compute
    saved = most = 0
    steps = [step.on_rank(plan.mesh.size("tp")) for step in backward.steps]
    for number, step in enumerate(steps):
        if number == backward.shortcut:
            saved += _kept(steps[-1], plan)
        if backward.shortcut is None or step is not steps[-1]:
            saved += _kept(step, plan)
        most = max(most, saved + step.arriving * samples * (norm if step.normalises else compute))
    return max(0, steps[-1].arriving * samples * compute + most - saved)


def rounded_again_bytes(block: BlockSpec, plan: Plan) -> int:
    """Return the bytes of the weights of convolutions and products that a second forward rounds."""
    return rounded_bytes(
        (parameter for layer in block.layers for parameter in layer.parameters if len(parameter.shape) > 1), plan
    )


def _kept(step: BackwardStep, plan: Plan) -> int:
    return plan.batch.micro_batch * (step.kept * _element_bytes(step, plan) + step.indices * INDEX)


def _element_bytes(step: BackwardStep, plan: Plan) -> int:
    return BYTES[plan.precision.accurate if step.normalises else plan.precision.compute]
