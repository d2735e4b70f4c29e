"""The bytes of the head's product and of the loss in backward, with all logits at once or in chunks of the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from parallelrun.base.precision import BYTES
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.contract.tensor_strategy import LayerBackward
from parallelrun.planner.model.model_spec import LayerSpec
from parallelrun.planner.model.product import Product

from .activation_memory import INDEX, rounded_bytes
from .traffic import AXIS


def loss_backward(product: Product | None, plan: Plan) -> LayerBackward:
    """Backward through the loss, of all logits or of a part of the vocabulary. product: of the head.

    One device saves log-probabilities in the accurate dtype. Where the vocabulary is split, the logits and two
    numbers per row are saved; their gradient is computed in the accurate dtype, of a copy where it is another.
    """
    targets, vocab = plan.batch.micro_batch * plan.spec.targets_per_sample // plan.mesh.size("cp"), plan.spec.vocab
    compute, accurate = BYTES[plan.precision.compute], BYTES[plan.precision.accurate]
    if product is None or plan.mesh.size(AXIS) == 1:
        logits = targets * vocab * accurate
        capped = compute * bool(plan.spec.logit_softcap)  # of a logit, kept by its cap
        squared = logits if plan.spec.z_loss else 0  # the z-loss keeps the logits, and gives a gradient of its own
        return LayerBackward(logits + squared + targets * (INDEX + vocab * capped), logits, logits, squared)
    rows, columns = product.y.local(targets, vocab, plan.mesh.sizes)
    saved = rows * (columns * compute + accurate) + targets * INDEX
    copies = 2 if compute != accurate or plan.spec.logit_softcap else 1
    return LayerBackward(saved, 0, rows * columns * copies * accurate)


def of_depths(
    heads: Sequence[LayerBackward], loss: LayerBackward, product: Product | None, plan: Plan
) -> list[LayerBackward]:
    """The heads of the depths of multi-token prediction and their losses. The gradients of some logits wait while the
    loss of others runs backward, then in turn for their heads."""
    logits = plan.num_rows * plan.spec.vocab
    if product is not None:
        logits = prod(product.y.local(plan.num_rows, plan.spec.vocab, plan.mesh.sizes))
    waiting = logits * BYTES[plan.precision.compute]
    losses = [replace(loss, arriving=loss.arriving + i * waiting) for i in reversed(range(len(heads)))]
    return [*(replace(x, arriving=x.arriving + i * waiting) for i, x in enumerate(heads)), *losses]


def chunked_backwards(
    head: LayerSpec, product: Product, gradients: int, moved: int, plan: Plan
) -> tuple[LayerBackward, LayerBackward]:
    """(of the head, of the loss) where the logits are computed in chunks (`parallelrun.models.chunked_loss`).

    A chunk needs in forward the head's input, its rounded weights, and the chunk's logits with their gradients, or the
    product that is added to the gradient of rounded weights. gradients: bytes of those of the head's weights, which
    wait for backward of the head, or of weights where that runs apart; moved: what summing the gradient of the input
    needs.
    """
    sizes, spec = plan.mesh.sizes, plan.spec
    compute, accurate = BYTES[plan.precision.compute], BYTES[plan.precision.accurate]
    rows, hidden = product.gathered_x.local(plan.num_rows, head.in_features, sizes)
    chunk, columns = -(-rows // plan.loss_chunks), product.y.local(1, head.out_features, sizes)[1]
    weights = (*head.parameters, *((spec.parameters[head.tied],) if head.tied else ()))
    rounded = rounded_bytes(weights, plan)
    split = compute + accurate * (1 if compute == accurate else 2)
    capped = compute * bool(spec.logit_softcap)
    logits = capped + ((5 if spec.z_loss else 3) * accurate if plan.mesh.size(AXIS) == 1 else split)
    products = columns * compute + max(-(-rounded // chunk), hidden * compute)
    in_forward = rows * hidden * compute + rounded + chunk * max(columns * logits, products)
    apart = gradients if plan.pipeline.splits_backward else 0
    gives = prod(product.x.local(plan.num_rows, head.in_features, sizes)) * compute if moved else 0
    return (
        LayerBackward(rows * hidden * compute + apart, 0, gives, moved, gradients),
        LayerBackward(gradients - apart, in_forward=in_forward),
    )
