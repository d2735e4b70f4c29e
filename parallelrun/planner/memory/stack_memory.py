"""What a block keeps for backward under another program than this one (`plan.stack`)."""

from __future__ import annotations

from math import prod

from parallelrun.base.precision import BYTES
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.model.model_spec import GATED, BlockSpec, LayerSpec, ParameterSpec

SCORE_BYTES = 5  # softmax, dropout's mask and its result of each score (Korthikanti et al. 2022, 4.1), in 16 bits


def saved_plan(plan: Plan) -> Plan:
    """The plan with the recomputation of this program that keeps what the stack keeps before it recomputes."""
    other = plan.recompute == "selective" and plan.stack.selective != "elementwise"
    return plan.sharing(recompute="none") if other else plan


def of_stack(block: BlockSpec, kept: int, again: int, plan: Plan) -> tuple[int, int]:
    """(bytes that a microbatch of the block keeps, saved bytes that its backward recomputes first), from those that
    this program has under `saved_plan`."""
    if block.kind != "transformer":
        return kept, again
    stack, spec, tp = plan.stack, plan.spec, plan.mesh.size("tp")
    compute = BYTES[plan.precision.compute]
    scores = 0 if stack.fused_attention else SCORE_BYTES * plan.num_rows * spec.heads * spec.seq // tp
    gate = plan.num_rows * spec.ffn // tp * compute if stack.separate_gate and spec.activation in GATED else 0
    if plan.runs_again and block.is_recomputed:
        split = stack.partitioned_activations and not plan.tensor.sequence_parallel
        return kept // tp if split else kept, again + scores + gate - _in_fp8(block, plan)
    if plan.recompute != "selective":
        return kept + scores + gate - _in_fp8(block, plan), again
    if stack.selective == "elementwise":
        return kept + scores + gate, again
    if stack.selective == "attention":
        return kept + gate - _in_fp8(block, plan), again + scores
    own = min(kept, _of_products(block, plan))
    return own, again + kept - own + scores + gate


def _in_fp8(block: BlockSpec, plan: Plan) -> int:
    """Bytes by which a block keeps less where linear layers keep their inputs in fp8, experts' inputs apart. That of
    the first row-parallel layer is kept twice: attention needs its result in 16 bits."""
    if not (plan.precision.others and plan.stack.fp8_copies):
        return 0
    inputs = {
        layer: prod(product.x.local(plan.num_rows, layer.in_features, plan.mesh.sizes))
        for layer, _ in products_of(block)
        if (product := plan.tensor.product_of(layer, plan))
    }
    attended = sum([size for layer, size in inputs.items() if layer.layer_role == "row_parallel"][:1])
    return sum(inputs.values()) - 2 * attended


def products_of(block: BlockSpec) -> list[tuple[LayerSpec, ParameterSpec]]:
    """The weights of a block's products, each with its layer, in the order in which they are multiplied."""
    dense = (layer for layer in block.layers if not layer.layer_role.startswith(("expert", "router", "shared")))
    return [(layer, weight) for layer in dense for weight in layer.parameters if len(weight.shape) == 2]


def _of_products(block: BlockSpec, plan: Plan) -> int:
    """Bytes of a block's input, of the results of its first, third, ... product, and of attention."""
    spec, rows, compute = plan.spec, plan.num_rows, BYTES[plan.precision.compute]
    results = [
        prod(product.y.local(rows, layer.out_features, plan.mesh.sizes)) * weight.shape[0] // layer.out_features
        for layer, weight in products_of(block)[::2]
        if (product := plan.tensor.product_of(layer, plan))
    ]
    whole = plan.tensor.activation_layout(None, plan).local(rows, spec.hidden, plan.mesh.sizes)
    attended = rows * (spec.qk_features * compute + spec.heads * BYTES[plan.precision.accurate])
    return compute * (prod(whole) + sum(results)) + attended // plan.mesh.size("tp")
