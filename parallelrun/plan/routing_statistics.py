"""What a layer with experts tells of its routing: one vector that ranks and microbatches add up; torch-free.

The vector is [load per expert, kept per expert, SCALARS...], fp64. `load` counts the assignments that were wanted,
before capacity and random refusal, `kept` those that were made.
"""

from __future__ import annotations

from math import log

from parallelrun.model_spec import RouterSpec

# tokens; routing groups; first choices and all later choices that were not kept; tokens that no expert kept; the
# auxiliary loss and the z-loss, without coefficients, summed over groups; entropy of the shares summed over tokens
SCALARS = ("tokens", "groups", "first_dropped", "second_dropped", "overflow", "aux", "z", "router_entropy")


def size(num_experts: int) -> int:
    """Elements of the vector."""
    return 2 * num_experts + len(SCALARS)


def exchanged(num_layers: int, num_experts: int) -> int:
    """Elements of what ranks tell each other in a step: every layer's vector, each with its all-to-alls' bytes."""
    return num_layers * (size(num_experts) + 1)


def describe(vector: list[float], router: RouterSpec, seq: int) -> dict[str, object]:
    """What the vector of one layer, summed over whatever was routed in training, means. seq: tokens of a sample.

    load, kept: assignments per expert. drop_first, drop_second: parts of the first and of all later choices that were
    not kept; overflow: part of the tokens that no expert kept. capacity_used: part of all places that were filled, None
    where experts have no limit. max_vio: largest load over mean load, less 1 (Wang et al. 2024); load_entropy: 1 where
    balanced, 0 where one expert takes all. aux, z_loss: means over groups, without coefficients; router_entropy: mean
    over tokens, in nats.
    """
    num_experts = (len(vector) - len(SCALARS)) // 2
    assert num_experts > 0 and len(vector) == size(num_experts), f"{len(vector)} numbers are no routing statistics"
    load, kept = vector[:num_experts], vector[num_experts : 2 * num_experts]
    of = dict(zip(SCALARS, vector[2 * num_experts :]))
    later = of["tokens"] * (router.top_k - 1)
    places = router.capacity(router.group_samples * seq, num_experts) * of["groups"] * num_experts
    return {
        "load": load,
        "kept": kept,
        "drop_first": _part(of["first_dropped"], of["tokens"]),
        "drop_second": _part(of["second_dropped"], later),
        "overflow": _part(of["overflow"], of["tokens"]),
        "capacity_used": _part(sum(kept), places) if router.limited else None,
        "max_vio": _part(max(load) * num_experts, sum(load), 1.0) - 1.0,
        "load_entropy": _evenness(load),
        "aux": _part(of["aux"], of["groups"]),
        "z_loss": _part(of["z"], of["groups"]),
        "router_entropy": _part(of["router_entropy"], of["tokens"]),
    }


def _part(amount: float, whole: float, of_nothing: float = 0.0) -> float:
    return amount / whole if whole else of_nothing


def _evenness(load: list[float]) -> float:
    """Entropy of the load over experts, over its largest value."""
    total = sum(load)
    if total == 0 or len(load) == 1:
        return 1.0
    return sum(-part / total * log(part / total) for part in load if part > 0) / log(len(load))
