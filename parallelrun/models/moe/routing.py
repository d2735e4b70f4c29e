"""Who goes to which expert, with which weight, and who is dropped: pure functions of the router's logits.

GShard's Algorithm 1 (Lepikhin et al. 2020), Switch (Fedus et al. 2021), top-k with softmax or sigmoid scores (Mixtral,
DeepSeek-V3) and expert choice (Zhou et al. 2022). A routing group is routed by itself, so that the same tokens are
dropped under every plan. Nothing here waits for the device, and nothing of size assignments x experts is made.

Equal scores: the expert of the lower index is chosen, and the earlier token stays. `argmax` and stable sorts promise
that on every device and for every batch size; `topk` promises no order of equals.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from parallelrun.models.spec import RouterSpec

LEAST_SUM = 1e-20  # of weights that are divided by their sum (DeepSeek-V3's), so that 0 / 0 is 0, backward too


@dataclass(frozen=True)
class Routing:
    """Where the T tokens of one microbatch go: A assignments of a token to an expert.

    tokens, experts: int64 (A,); in order of choice, then token (A = T x choices), for expert choice of group, expert,
    place (A = G x E x C). weights: (A,), differentiable, 0 where not kept. kept: bool (A,). slots: int64 (A,), place
    among the `capacity` places of its expert in its group: unique per (group, expert) and below capacity where kept,
    meaningless elsewhere. num_tokens = num_groups equal groups of consecutive tokens.
    auxiliary: 0-d, differentiable: aux_coefficient x aux + z_coefficient x z, summed over groups; None where both
    coefficients are 0 or in evaluation. statistics: fp64 (statistics.size(num_experts),), detached.
    """

    tokens: Tensor
    experts: Tensor
    weights: Tensor
    kept: Tensor
    slots: Tensor
    num_tokens: int
    num_groups: int
    capacity: int
    num_experts: int
    auxiliary: Tensor | None
    statistics: Tensor


@dataclass(frozen=True)
class _Chosen:
    """Assignments as in Routing. load: int64 (G, E), wanted before any is dropped; counted: the same of what the
    auxiliary loss counts, `num_counted` in each group; choices: how many each token has, 0: experts choose."""

    tokens: Tensor
    experts: Tensor
    weights: Tensor
    kept: Tensor
    slots: Tensor
    load: Tensor
    counted: Tensor
    num_counted: int
    choices: int


def route(
    logits: Tensor,
    spec: RouterSpec,
    *,
    training: bool,
    selection_bias: Tensor | None = None,
    uniform: Tensor | None = None,
) -> Routing:
    """Route G groups of S tokens each to E experts.

    logits: (G, S, E) in fp32 or fp64. selection_bias: (E,), added to the scores for choosing only (DeepSeek-V3).
    uniform: (G, S) in [0, 1), each token's draw for its random second expert; needed for gshard with
    second_expert=random in training, else not read.
    """
    num_groups, group_size, num_experts = logits.shape
    capacity = spec.capacity(group_size, num_experts, training)
    rows = logits.flatten(0, 1)
    if spec.score == "softmax":
        scores = shares = torch.softmax(rows, dim=-1)
    else:
        scores = torch.sigmoid(rows)
        shares = scores / scores.sum(-1, keepdim=True).clamp(min=LEAST_SUM)
    ranking = scores.detach()
    if selection_bias is not None:
        ranking = ranking + selection_bias.detach().to(ranking.dtype)
    if spec.kind == "expert_choice":
        chosen = _experts_choose(scores, ranking, spec, num_groups, capacity)
    else:
        draws = uniform if training and spec.kind == "gshard" and spec.second_expert == "random" else None
        assert draws is not None or not training or spec.kind != "gshard" or spec.second_expert == "all", "no draws"
        chosen = _tokens_choose(scores, ranking, spec, num_groups, capacity, draws)
    # balanced value 1: E^2 times the mean over experts of GShard's l_aux, which is Switch's scale
    mean_shares = shares.view(logits.shape).mean(1)
    aux = (chosen.counted * mean_shares).sum() * (num_experts / chosen.num_counted)
    z = torch.logsumexp(rows, dim=-1).square().sum() / group_size
    auxiliary = None
    if training and (spec.aux_coefficient or spec.z_coefficient):
        auxiliary = spec.aux_coefficient * aux + spec.z_coefficient * z
    return Routing(
        chosen.tokens, chosen.experts, chosen.weights, chosen.kept, chosen.slots, rows.size(0), num_groups, capacity,
        num_experts, auxiliary, _statistics(chosen, shares.detach(), aux.detach(), z.detach(), num_groups),
    )  # fmt: skip


def _tokens_choose(
    scores: Tensor, ranking: Tensor, spec: RouterSpec, num_groups: int, capacity: int, draws: Tensor | None
) -> _Chosen:
    """Every token goes to its `top_k` best experts while they have room. scores, ranking: (T, E)."""
    (num_tokens, num_experts), choices = scores.shape, spec.top_k
    fixed = {"gshard": 2, "switch": 1}.get(spec.kind, choices)
    assert choices == fixed <= num_experts, f"{spec.kind} with top_k {choices} of {num_experts} experts"
    group_size = num_tokens // num_groups
    best = _best(ranking, choices)
    weights = scores.gather(1, best).t()  # (choices, T), as all that follows
    sums = weights.sum(0).clamp(min=LEAST_SUM)
    # a single choice keeps its score: made to sum to 1, the router would get no gradient (Fedus et al. 2021, 2.1)
    renormalise = spec.renormalise if choices > 1 else "none"
    if renormalise == "before":
        weights = weights / sums
    experts = best.t().reshape(-1)
    tokens = torch.arange(num_tokens, device=scores.device).repeat(choices)
    keys = experts if num_groups == 1 else experts + tokens.div(group_size, rounding_mode="floor") * num_experts
    first_weights = weights.detach().reshape(-1) if spec.drop_policy == "probability" else None
    slots, load = _places(keys, num_groups * num_experts, first_weights)
    kept = slots < capacity
    if draws is not None:
        # the second expert's share of the two, whatever `renormalise` makes of the weights: the paper's probability
        share = scores.detach().gather(1, best[:, 1:]).view(-1) / sums.detach()
        kept[num_tokens:] &= 2 * share > draws.reshape(-1)
    if capacity < group_size or draws is not None:
        weights = weights * kept.view(choices, num_tokens)
    if renormalise == "after":
        weights = weights / weights.sum(0).clamp(min=LEAST_SUM)
    if spec.scaling != 1.0:
        weights = weights * spec.scaling
    load = load.view(num_groups, num_experts)
    counted, num_counted = load, group_size * choices
    if spec.kind == "gshard":
        counted = torch.zeros_like(load).view(-1)
        counted.scatter_add_(0, keys[:num_tokens], torch.ones_like(keys[:num_tokens]))
        counted, num_counted = counted.view_as(load), group_size
    return _Chosen(tokens, experts, weights.reshape(-1), kept, slots, load, counted, num_counted, choices)


def _best(ranking: Tensor, choices: int) -> Tensor:
    """int64 (T, choices): each token's experts, the best first."""
    if choices > 2:
        return torch.sort(ranking, dim=-1, descending=True, stable=True).indices[:, :choices]
    first = ranking.argmax(-1, keepdim=True)
    if choices == 1:
        return first
    return torch.cat((first, ranking.scatter(1, first, float("-inf")).argmax(-1, keepdim=True)), dim=1)


def _places(keys: Tensor, num_keys: int, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """(each assignment's number among those of its key, how many each key has). With weights, the highest of a key come
    first, else those that come first. The counter of Algorithm 1: every assignment counts, refused or not."""
    if weights is None:
        ordered, order = torch.sort(keys, stable=True)
    else:
        by_weight = torch.sort(weights, descending=True, stable=True).indices
        ordered, order = torch.sort(keys[by_weight], stable=True)
        order = by_weight[order]
    bounds = torch.searchsorted(ordered, torch.arange(num_keys + 1, device=keys.device))  # bincount waits for a GPU
    numbers = torch.arange(keys.numel(), device=keys.device) - bounds[ordered]
    return torch.empty_like(keys).scatter_(0, order, numbers), bounds.diff()


def _experts_choose(scores: Tensor, ranking: Tensor, spec: RouterSpec, num_groups: int, capacity: int) -> _Chosen:
    """Every expert takes the `capacity` tokens of each group that score best with it.

    A token's weights are its scores (Zhou et al. 2022), divided by the number of experts that took it unless
    renormalise=none (Mesh-TensorFlow). Made to sum to 1, a token of one expert would give the router no gradient.
    """
    num_tokens, num_experts = scores.shape
    group_size, device = num_tokens // num_groups, scores.device
    by_expert = ranking.view(num_groups, group_size, num_experts).transpose(1, 2)  # (G, E, S)
    taken = torch.sort(by_expert, dim=-1, descending=True, stable=True).indices[..., :capacity]
    starts = torch.arange(num_groups, device=device).view(-1, 1, 1) * group_size
    tokens = (taken + starts).reshape(-1)
    experts = torch.arange(num_experts, device=device).view(1, -1, 1).expand_as(taken).reshape(-1)
    weights = scores.reshape(-1).gather(0, tokens * num_experts + experts)
    if spec.renormalise != "none":
        hits = torch.zeros(num_tokens, dtype=scores.dtype, device=device).scatter_add_(
            0, tokens, torch.ones_like(weights, requires_grad=False)
        )
        weights = weights / hits[tokens]
    if spec.scaling != 1.0:
        weights = weights * spec.scaling
    load = torch.full((num_groups, num_experts), capacity, dtype=torch.int64, device=device)
    slots = torch.arange(capacity, device=device).repeat(num_groups * num_experts)
    kept = torch.ones_like(tokens, dtype=torch.bool)
    return _Chosen(tokens, experts, weights, kept, slots, load, load, num_experts * capacity, 0)


def _statistics(chosen: _Chosen, shares: Tensor, aux: Tensor, z: Tensor, num_groups: int) -> Tensor:
    """See `statistics`. shares: (T, E), each token's scores made to sum to 1."""
    num_tokens, num_experts = shares.shape
    zeros = torch.zeros(num_experts, dtype=torch.float64, device=shares.device)
    kept = zeros.scatter_add(0, chosen.experts, chosen.kept.double())
    entropy = torch.special.entr(shares).sum(dtype=torch.float64)
    if chosen.choices:
        by_choice = chosen.kept.view(chosen.choices, num_tokens)
        taken = by_choice.any(0).sum()
        first = by_choice[0].sum()
        dropped = (num_tokens - first, num_tokens * (chosen.choices - 1) - (by_choice.sum() - first))
    else:
        reached = torch.zeros(num_tokens, dtype=torch.bool, device=shares.device)
        taken = reached.index_fill_(0, chosen.tokens, True).sum()
        dropped = (zeros[0], zeros[0])
    counts = torch.tensor((num_tokens, num_groups), dtype=torch.float64).to(shares.device)
    scalars = torch.stack([one.double() for one in (*dropped, num_tokens - taken, aux, z, entropy)])
    return torch.cat((chosen.load.sum(0).double(), kept, counts, scalars))
