"""What blocks of a user's module need in backward: by what was measured, and by the layers that have adapters."""

from __future__ import annotations

from parallelrun.base.precision import BYTES
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.contract.tensor_strategy import LayerBackward
from parallelrun.planner.model.model_spec import MEASURED, SAMPLE_SET_ROLE, BlockSpec, LayerSpec


def stated_backward(block: BlockSpec, plan: Plan) -> LayerBackward:
    """Return the backward pass of a block that says what it saves: as a whole, with the gradients of activations at the
    layer of a user's block where they need most, beside the gradient of a residual."""
    each = plan.batch.micro_batch * BYTES[plan.precision.compute]
    kept = round(block.saved_on_rank(plan.mesh.size("tp")) * each)
    widths = [
        _widths(layer, plan)
        for layer in block.layers
        if layer.out_features and not layer.is_adapter and layer.layer_role != "embedding"
    ]
    if block.kind != MEASURED or not widths:
        return LayerBackward(kept)
    out, into = max(widths, key=sum)
    row = plan.num_rows * BYTES[plan.precision.compute]
    return LayerBackward(kept, (out + plan.spec.hidden) * row, into * row)


def _widths(layer: LayerSpec, plan: Plan) -> tuple[int, int]:
    """The features of the gradients that a layer reads and gives on a rank, or that the function behind it does."""
    tp, role = plan.mesh.size("tp"), layer.layer_role
    out = layer.out_features // (tp if role in ("column_parallel", "head") else 1)
    return out, max(out, layer.in_features * layer.input_gradients // (tp if role == "row_parallel" else 1))


def factor_backward(layer: LayerSpec, waiting: int, weights: int, plan: Plan) -> LayerBackward:
    """Return the backward pass of a factor of an adapter. waiting, weights: bytes of what waits and of its gradient.

    The second factor saves the few features that it reads; what the first one reads is counted at its layer.
    """
    features = layer.in_features if layer.in_features < layer.out_features else 0
    return LayerBackward(plan.num_rows * features * BYTES[plan.precision.compute], waiting, weights=weights)


def says_itself(block: BlockSpec, plan: Plan) -> bool:
    """Whether the model says what a block saves (`saved_elements`): of images, and of a user's module, which was
    measured, also as halves where it is split: a role of some layers tells nothing of the others."""
    is_divided = plan.tensor.is_one_dimensional and not plan.tensor.sequence_parallel
    is_measured = plan.mesh.size("tp") == 1 or (is_divided and block.replicated_elements is not None)
    says = plan.spec.kind == "images" or (block.kind == MEASURED and is_measured)
    return says or {layer.layer_role for layer in block.layers} <= {"", "dropout", SAMPLE_SET_ROLE}
