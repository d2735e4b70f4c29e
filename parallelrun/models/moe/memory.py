"""How many rows the experts of a layer compute, and what each row keeps for backward.

A row is one assignment of a token to an expert that is kept. Routing groups are of whole samples, which a grid divides:
a microbatch here is a rank's samples of it. Where several ranks (of cp; of tp, where ep spans it) share a sequence,
each of them lists the assignments of all tokens and keeps those of its own. The expert dispatcher says how many arrive
from other ranks.
"""

from __future__ import annotations

from parallelrun.base.precision import BYTES
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.model.model_spec import GATED, BlockSpec, LayerSpec
from parallelrun.planner.model.model_spec.router import RouterSpec


def router_of(plan: Plan) -> RouterSpec:
    """Return the router of a model with experts."""
    assert plan.spec.router is not None, "a model without experts"
    return plan.spec.router


def num_groups(plan: Plan) -> int:
    """Return the routing groups of a rank's samples of a microbatch."""
    return plan.batch.micro_batch // plan.sample_parts // router_of(plan).group_samples


def num_slots(plan: Plan, num_experts: int | None = None) -> int:
    """Return the capacity slots that so many experts (None: all) have for a microbatch."""
    groups, experts = num_groups(plan), plan.spec.experts
    capacity = router_of(plan).capacity(_num_tokens(plan) // groups, experts)
    return (experts if num_experts is None else num_experts) * groups * capacity


def num_assignments(plan: Plan) -> int:
    """Return the assignments of a microbatch's tokens to experts, dropped ones and those of other ranks included."""
    router = router_of(plan)
    return num_slots(plan) if router.kind == "expert_choice" else _num_tokens(plan) * router.top_k


def num_kept(plan: Plan) -> int:
    """Return the rows of a microbatch under an even load: one per choice, at most one per capacity slot."""
    return min(num_assignments(plan), num_slots(plan)) // num_sharing(plan)


def num_sharing(plan: Plan) -> int:
    """Return the ranks that share the tokens of a microbatch, each of which sends its own to experts."""
    return plan.mesh.size("cp") * plan.token_ranks // plan.expert_tp


def num_own(plan: Plan) -> int:
    """Return the tokens of a microbatch that a rank sends to experts."""
    return _num_tokens(plan) // num_sharing(plan)


def _num_tokens(plan: Plan) -> int:
    """Return the tokens of a rank's samples of a microbatch."""
    return num_routed(plan) * plan.mesh.size("cp")


def num_routed(plan: Plan) -> int:
    """Return the positions that a rank holds of its samples of a microbatch."""
    return plan.num_rows // plan.sample_parts


def expert_width(layer: LayerSpec, plan: Plan) -> int:
    """Return the features inside an expert that a rank has."""
    return layer.parameters[0].shape[1] // plan.expert_tp


def row_bytes(layer: LayerSpec, block: BlockSpec, plan: Plan) -> int:
    """Return what one row keeps for backward: the row, the inside of its expert, and the expert's output."""
    inside = expert_width(layer, plan)
    # gate and up; relu keeps its output
    opened = 2 if plan.spec.activation in GATED else int(plan.spec.activation != "relu")
    activated = 0 if plan.recompute == "selective" and block.is_recomputed and opened else 1
    return (2 * plan.spec.hidden + (opened + activated) * inside) * BYTES[plan.precision.compute]
