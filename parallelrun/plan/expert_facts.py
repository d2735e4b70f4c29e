"""What a plan says about its experts, as plain data: how many, where, how full they may be, and who holds them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from parallelrun.plan.structure import Plan


def facts(plan: Plan) -> dict[str, Any] | None:
    """For JSON and the screen; None for a model without experts.

    layers: blocks that have experts. group_tokens: tokens of a routing group. capacity, eval_capacity: tokens that an
    expert takes of it at most, None without a limit. held: experts of a layer that a rank has.
    """
    router, spec = plan.spec.router, plan.spec
    if router is None:
        return None
    tokens = router.group_samples * spec.targets_per_sample
    return {
        "experts": spec.experts,
        "held": spec.experts // plan.mesh.size("ep"),
        "layers": [b.name for b in spec.blocks if any(layer.layer_role == "router" for layer in b.layers)],
        "group_tokens": tokens,
        "capacity": router.capacity(tokens, spec.experts) if router.limited else None,
        "eval_capacity": router.capacity(tokens, spec.experts, training=False) if router.limited else None,
        "router": asdict(router),
        "way": _dispatcher(plan),
    }


def _dispatcher(plan: Plan) -> dict[str, Any]:
    if plan.expert is None:
        return {"kind": "none", "chunks": 1, "group_size": 1, "overlap": True}
    return {"kind": plan.expert.kind, **asdict(plan.expert)}


def views(plan: Plan) -> dict[str, str]:
    """By axis: what is split or copied over its ranks, where ep makes several views of dp; else nothing."""
    ep, experts = plan.mesh.size("ep"), plan.spec.experts
    if ep == 1:
        return {}
    inner = plan.mesh.size("ep_inner")
    texts = {
        "pp": "stages",
        "dp": "replicas of the data",
        "dp_replicate": "copies of each shard",
        "dp_shard": "shards of all but experts",
        "expert_dp": "copies of the same experts",
        "expert_dp_shard": "shards of the same experts",
        "ep": f"{experts} experts, {experts // ep} each",
        "ep_outer": f"groups of {inner} ranks of ep",
        "ep_inner": "ranks of ep inside a group",
        "tp": "features",
    }
    names = (*plan.mesh.mesh_dim_names, *(axis for axis, _ in plan.mesh.flattened))
    return {axis: texts[axis] for axis in names if axis in texts}
