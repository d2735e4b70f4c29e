"""Routing statistics of a layer with experts: one fp64 vector, summed over ranks and microbatches.

The vector is [load per expert, kept per expert, SCALARS...]. `load` counts the assignments of the router, before
capacity and random refusal; `kept` counts those that were dispatched.
"""

from __future__ import annotations

from math import log

from parallelrun.planner.model.model_spec.router import RouterSpec

# tokens; routing groups; first and later choices that were dropped; tokens that no expert kept; the auxiliary loss and
# the z-loss, without coefficients, summed over groups; entropy of the router's probabilities, summed over tokens
SCALARS = ("tokens", "groups", "first_dropped", "second_dropped", "overflow", "aux", "z", "router_entropy")


def size(num_experts: int) -> int:
    """Elements of the vector."""
    return 2 * num_experts + len(SCALARS)


def exchanged(num_layers: int, num_experts: int) -> int:
    """Elements that ranks exchange in a step: every layer's vector and the bytes of its all-to-alls."""
    return num_layers * (size(num_experts) + 1)


def describe(vector: list[float], router: RouterSpec, seq: int) -> dict[str, object]:
    """Return the figures of one layer's summed vector. seq: tokens of a sample.

    load, kept: assignments per expert. drop_first, drop_second: parts of the first and of later choices that were
    dropped. overflow: part of the tokens that no expert kept. capacity_used: part of the capacity slots that were
    filled, None without a limit. max_vio: largest load over mean load, minus 1 (Wang et al. 2024). load_entropy: 1 if
    balanced, 0 if one expert takes all. aux, z_loss: means over groups, without coefficients. router_entropy: mean over
    tokens, in nats.
    """
    num_experts = (len(vector) - len(SCALARS)) // 2
    assert num_experts > 0 and len(vector) == size(num_experts), (
        f"routing statistics cannot have {len(vector)} elements"
    )
    load, routed = vector[:num_experts], vector[num_experts : 2 * num_experts]
    of = dict(zip(SCALARS, vector[2 * num_experts :]))
    later = of["tokens"] * (router.top_k - 1)
    slots = router.capacity(router.group_samples * seq, num_experts) * of["groups"] * num_experts
    return {
        "load": load,
        "kept": routed,
        "drop_first": _part(of["first_dropped"], of["tokens"]),
        "drop_second": _part(of["second_dropped"], later),
        "overflow": _part(of["overflow"], of["tokens"]),
        "capacity_used": _part(sum(routed), slots) if router.limited else None,
        "max_vio": _part(max(load) * num_experts, sum(load), 1.0) - 1.0,
        "load_entropy": _evenness(load),
        "aux": _part(of["aux"], of["groups"]),
        "z_loss": _part(of["z"], of["groups"]),
        "router_entropy": _part(of["router_entropy"], of["tokens"]),
    }


def _part(amount: float, total: float, if_empty: float = 0.0) -> float:
    return amount / total if total else if_empty


def _evenness(load: list[float]) -> float:
    """Entropy of the load over experts, relative to its maximum."""
    total = sum(load)
    if total == 0 or len(load) == 1:
        return 1.0
    return sum(-part / total * log(part / total) for part in load if part > 0) / log(len(load))
