"""Bytes that one microbatch of a layer with experts saves for backward, every expert being on its own rank.

T tokens choose among E experts, which gives n rows. a: bytes of the accurate dtype, in which routing computes.

    router    its input T h, in the accurate dtype (where that is the compute dtype: the norm's output); with jitter its
              factors too; scores of all experts, as its softmax and its gather save them; per choice its expert, weight
              and whether it was dropped; loads for the auxiliary loss
    dispatch  per row its token, per token where its rows begin
    experts   the rows n h; per product, where each expert's rows end; the activation's input and result, n f
    combine   the results of the experts, n h, their weights and tokens

n is that of an even load; with a limited router at most its capacity slots; with an expert dispatcher what it makes of
them. By which indices it reorders them is predicted by itself.
"""

from __future__ import annotations

from parallelrun.base.precision import BYTES
from parallelrun.models.moe import memory as rows
from parallelrun.planner.contract.parameters import element_bytes
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.contract.tensor_strategy import LayerBackward
from parallelrun.planner.model.model_spec import BlockSpec, LayerSpec

from .activation_memory import INDEX, MASK, activates_again, activation_scratch, local_numel, recomputes_norms
from .traffic import overlaps

OFFSET = 4  # bytes of where an expert's rows end, which every grouped product keeps


def input_bytes(block: BlockSpec, plan: Plan) -> int:
    """Return the bytes of the router's saved input: a tensor of its own where sequences were gathered or sliced, or
    where the input is widened or jittered; else the norm's output, which is counted elsewhere."""
    compute, accurate = BYTES[plan.precision.compute], BYTES[plan.precision.accurate]
    own = rows.num_own(plan) * plan.spec.hidden * accurate
    if rows.router_of(plan).jitter > 0.0:
        return 2 * own
    if compute != accurate or plan.tensor.sequence_parallel != plan.ep_spans_tp or moved_bytes(plan):
        return own
    roles = [layer.layer_role for layer in block.layers]
    counted = "column_parallel" in roles[roles.index("router") :]  # a shared expert reads it too, or a gathered copy
    counted &= overlaps(plan) or not plan.tensor.sequence_parallel
    return 0 if counted or recomputes_norms(block, plan) else own


def moved_bytes(plan: Plan) -> int:
    """Return the bytes of a rank's complete rows where a grid gathers or exchanges features for them; else 0."""
    moves = plan.token_ranks > 1 and not plan.tensor.is_one_dimensional
    return moves * rows.num_own(plan) * plan.spec.hidden * BYTES[plan.precision.compute]


def routing_bytes(plan: Plan) -> int:
    """Scores, choices and what the auxiliary losses read."""
    spec, router, tokens = plan.spec, rows.router_of(plan), rows.num_routed(plan)
    accurate, scores = BYTES[plan.precision.accurate], tokens * spec.experts
    saved = scores * accurate
    if router.score == "softmax" or router.z_coefficient:
        saved += scores * accurate  # of the logarithms
    if router.score != "softmax" and router.aux_coefficient:
        saved += 2 * tokens * accurate  # sums over experts
    if router.aux_coefficient:
        saved += rows.num_groups(plan) * spec.experts * accurate
    if router.z_coefficient:
        saved += tokens * accurate
    if rows.num_sharing(plan) > 1:
        saved += rows.num_assignments(plan) * MASK  # whether a token is one's own
    return saved + _choices(plan)


def _choices(plan: Plan) -> int:
    router, tokens, accurate = rows.router_of(plan), rows.num_routed(plan), BYTES[plan.precision.accurate]
    if router.kind == "expert_choice":
        return rows.num_assignments(plan) * INDEX * (1 if router.renormalise == "none" else 2)
    saved = tokens * router.top_k * INDEX
    if router.top_k > 1 and router.renormalise != "none":
        saved += tokens * (router.top_k + 2) * accurate
    group = tokens // rows.num_groups(plan)
    refuses = router.capacity(group, plan.spec.experts) < group
    refuses |= router.kind == "gshard" and router.second_expert == "random"
    return saved + (tokens * router.top_k * MASK if refuses else 0)


def backwards(layer: LayerSpec, block: BlockSpec, waiting: int, plan: Plan) -> tuple[LayerBackward, ...]:
    """The passes of a layer of experts, in forward order: rows and the first products, the activation, the last
    product, combining. waiting: bytes of the gradients that go past the layer."""
    own, compute = rows.num_kept(plan), BYTES[plan.precision.compute]
    count = plan.expert.num_computed(plan) if plan.expert else own
    indices = (2 * own + rows.num_assignments(plan) + rows.num_own(plan)) * INDEX
    rows_bytes = count * plan.spec.hidden * compute
    inside = count * rows.expert_width(layer, plan) * compute
    between = count * rows.row_bytes(layer, block, plan) - 2 * rows_bytes  # of the activation's input and result
    result = 0 if activates_again(block, plan) else inside
    ep = plan.mesh.size("ep")
    *opening, closing = (local_numel(weight, plan) // ep for weight in layer.parameters if len(weight.shape) == 3)
    biases = [local_numel(bias, plan) // ep for bias in layer.parameters if len(bias.shape) == 2]
    expanded = len(biases) * count * INDEX  # which expert's bias is added to each row
    stored = element_bytes(layer.parameters[0], plan)
    rounded = compute if compute != stored else 0  # a gradient beside the same in the stored dtype
    opened, again = len(opening) * inside, 0 if result else inside
    return (
        LayerBackward(
            indices + rows_bytes + _weights(layer, plan) + expanded,
            waiting + opened,
            len(opening) * rows_bytes,
            0,
            (sum(opening) + sum(biases)) * stored,
            opened,
            widened=max(opening) * rounded,
            stops=True,
        ),
        LayerBackward(between - result, waiting + inside, opened, activation_scratch(inside, plan)),
        LayerBackward(
            result,
            waiting + rows_bytes,
            inside + again,
            0,
            closing * stored,
            rows_bytes,
            widened=max(0, closing * rounded - again),
        ),
        LayerBackward(rows_bytes + own * compute, waiting, rows_bytes, rows_bytes, stops=True),
    )


def _weights(layer: LayerSpec, plan: Plan) -> int:
    """Return the bytes that products keep beside their weights: the end of each expert's rows (fp64 has no grouped
    product, and keeps none)."""
    products = sum(len(weight.shape) == 3 for weight in layer.parameters)
    ends = products * plan.spec.experts // plan.mesh.size("ep") * OFFSET
    return ends if plan.precision.compute != "float64" else 0
