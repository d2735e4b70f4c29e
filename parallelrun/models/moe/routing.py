"""Routing: the expert and weight of each token, and which tokens are dropped, as pure functions of the router's logits.

GShard's Algorithm 1 (Lepikhin et al. 2020), Switch (Fedus et al. 2021), top-k with softmax or sigmoid scores (Mixtral,
DeepSeek-V3) and expert choice (Zhou et al. 2022). A routing group is routed by itself, so that the same tokens are
dropped under every plan. Nothing here waits for the device, and no tensor has the size assignments x experts.

Equal scores: the expert with the lower index is chosen, and the earlier token is kept. `argmax` and stable sorts
guarantee that on every device and for every batch size; `topk` does not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from parallelrun.planner.model.model_spec.router import RouterSpec

LEAST_SUM = 1e-20  # smallest sum by which weights are divided (DeepSeek-V3's), so that 0 / 0 is 0, in backward too


class Routing(NamedTuple):
    """The A assignments of the T tokens of one microbatch to experts.

    A tuple, because torch 2.11's FSDP finds no tensors in a dataclass that a module returns, and so would not gather a
    router's weights for its backward.

    tokens, experts: int64 (A,); ordered by choice, then token (A = T x choices); under expert choice by group, expert,
    slot (A = G x E x C). weights: (A,), differentiable, 0 where dropped. kept: bool (A,). slots: int64 (A,), the
    capacity slot in its expert and group: unique per (group, expert) and below `capacity` where kept, meaningless
    elsewhere. The tokens form num_groups equal groups of consecutive tokens.
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
class _Selection:
    """assignments: tokens, experts, weights, kept and slots, as in Routing. load: int64 (G, E), the counts of all
    assignments; counted, the same of those that the auxiliary loss counts; kept_load, int64 (E,); lost, int64 (3,):
    dropped first choices, dropped later choices, tokens that no expert kept. Padding is in none of them."""

    assignments: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
    load: Tensor
    counted: Tensor
    kept_load: Tensor
    lost: Tensor


def route(
    logits: Tensor,
    spec: RouterSpec,
    *,
    training: bool,
    selection_bias: Tensor | None = None,
    uniform: Tensor | None = None,
    is_token: Tensor | None = None,
    decide: Callable[[Tensor], Tensor] | None = None,
) -> Routing:
    """Route G groups of S tokens each to E experts.

    logits: (G, S, E) in fp32 or fp64. selection_bias: (E,), added to the scores for choosing only (DeepSeek-V3).
    uniform: (G, S) in [0, 1), each token's draw for its second expert; read only if `draws_second`, then needed.
    is_token: bool (G, S), False for padding, which goes to no expert, takes no slot and is in no mean. Capacity stays
    that of S tokens, so that no size depends on the data.
    decide: given the scores (G x S, E), those by which experts are chosen and tokens dropped; None: the same. Weights
    always are the scores' own.
    """
    num_groups, group_size, num_experts = logits.shape
    capacity = spec.capacity(group_size, num_experts, training)
    rows = logits.flatten(0, 1)
    is_padding = None if is_token is None else ~is_token.flatten()
    log_shares = torch.log_softmax(rows, dim=-1)
    scores, shares, entropy = _scores(rows, log_shares, spec)
    deciding = scores.detach() if decide is None else decide(scores.detach())
    ranking = deciding
    if selection_bias is not None:
        ranking = ranking + selection_bias.detach().to(ranking.dtype)
    if spec.topk_group < spec.n_group:
        ranking = _within_best_groups(ranking, spec)
    if spec.kind == "expert_choice":
        selection = _experts_choose(scores, ranking, spec, num_groups, capacity, is_padding)
    else:
        draws = uniform if draws_second(spec, training) else None
        assert draws is not None or not draws_second(spec, training), "a random second expert needs uniform numbers"
        selection = _tokens_choose(scores, deciding, ranking, spec, num_groups, capacity, draws, is_padding)
    aux = _balance_loss(selection.counted, shares.view(logits.shape), is_token)
    # log-sum-exp is the logit less its log-share, for any expert: one kernel instead of logsumexp's six
    z = _means((rows[:, :1] - log_shares[:, :1]).square().view(num_groups, group_size, 1), is_token).sum()
    counted = [term for term in ((spec.aux_coefficient, aux), (spec.z_coefficient, z)) if training and term[0]]
    terms = [coefficient * loss for coefficient, loss in counted]  # leaves the graphs of unused losses out
    auxiliary = terms[0] + terms[1] if len(terms) == 2 else terms[0] if terms else None
    if is_padding is not None:
        entropy = entropy.masked_fill(is_padding.unsqueeze(1), 0.0)
    entropy = entropy.sum(dtype=torch.float64).view(1)
    num_tokens = entropy.new_full((1,), rows.size(0)) if is_token is None else is_token.sum().view(1)
    sizes = (num_tokens, entropy.new_full((1,), num_groups))  # no copy from the host
    means = (aux.detach().view(1), z.detach().view(1), entropy)
    vector = torch.cat((selection.load.sum(0), selection.kept_load, *sizes, selection.lost, *means))
    return Routing(*selection.assignments, rows.size(0), num_groups, capacity, num_experts, auxiliary, vector)


def _scores(rows: Tensor, log_shares: Tensor, spec: RouterSpec) -> tuple[Tensor, Tensor, Tensor]:
    """Return, all (T, E): the scores of tokens for experts; each expert's share of a token; its part of the entropy."""
    if spec.score == "softmax":
        shares = log_shares.exp()
        return shares, shares, -(shares.detach() * log_shares.detach())
    scores = torch.sigmoid(rows)
    shares = scores / scores.sum(-1, keepdim=True).clamp(min=LEAST_SUM)
    return scores, shares, torch.special.entr(shares.detach())


def _balance_loss(counted: Tensor, shares: Tensor, is_token: Tensor | None) -> Tensor:
    """Summed over groups. counted: (G, E); shares: (G, S, E). Its balanced value is 1: E^2 times the mean over experts
    that is GShard's l_aux; Switch's scale."""
    parts = counted.to(shares.dtype)
    parts = parts / parts.sum(1, keepdim=True).clamp(min=1)
    return (parts * _means(shares, is_token)).sum() * shares.size(2)


def _means(values: Tensor, is_token: Tensor | None) -> Tensor:
    """(G, S, n) -> (G, n): over the tokens of each group, without padding; 0 for a group of padding alone."""
    if is_token is None:
        return values.mean(1)
    numbers = is_token.sum(1, keepdim=True).clamp(min=1)
    return (values * is_token.unsqueeze(2)).sum(1) / numbers


def draws_second(spec: RouterSpec, training: bool) -> bool:
    """Whether the use of a token's second expert is drawn at random."""
    return training and spec.kind == "gshard" and spec.second_expert == "random"


def _tokens_choose(
    scores: Tensor,
    deciding: Tensor,
    ranking: Tensor,
    spec: RouterSpec,
    num_groups: int,
    capacity: int,
    draws: Tensor | None,
    is_padding: Tensor | None,
) -> _Selection:
    """Assign every token to its `top_k` best experts while they have free slots. scores, deciding, ranking: (T, E)."""
    (num_tokens, num_experts), choices = scores.shape, spec.top_k
    fixed = {"gshard": 2, "switch": 1}.get(spec.kind, choices)
    assert choices == fixed <= num_experts, f"{spec.kind} with top_k={choices} of {num_experts} experts"
    group_size = num_tokens // num_groups
    best = _best(ranking, choices)
    chosen_scores = scores.gather(1, best).t()  # (choices, T), as all that follows
    deciding = deciding.gather(1, best).t()
    early = spec.renormalise == "before" and choices > 1
    weights = _normalised(chosen_scores) if early else chosen_scores
    experts = best.t().reshape(-1)
    tokens = torch.arange(num_tokens, device=scores.device).expand(choices, num_tokens).reshape(-1)
    num_keys = num_groups * num_experts
    keys = experts
    if num_groups > 1:
        keys = experts + tokens.div(group_size, rounding_mode="floor") * num_experts
    if is_padding is not None:  # counted behind all experts
        keys = torch.where(is_padding.expand(choices, num_tokens).reshape(-1), num_keys, keys)
    priorities = None
    if spec.drop_policy == "probability":
        priorities = (_normalised(deciding) if early else deciding).reshape(-1)
    slots, load = _slots(keys, num_keys, priorities)
    load = load.view(num_groups, num_experts)
    kept, kept_load = (slots < capacity) & (keys < num_keys), load.clamp(max=capacity).sum(0)
    if draws is not None:
        # the paper's probability: the second's share of the two, independent of `renormalise`
        kept[num_tokens:] &= 2 * _normalised(deciding)[1] > draws.reshape(-1)
        kept_load = torch.zeros_like(experts[:1]).expand(num_experts).scatter_add(0, experts, kept.long())
    lost = torch.zeros_like(experts[:1]).expand(3)
    if capacity < group_size or draws is not None or is_padding is not None:
        weights = weights * kept.view(choices, num_tokens)
        lost = _lost(kept.view(choices, num_tokens), is_padding)
    if spec.renormalise == "after" and choices > 1:
        weights = _normalised(weights)
    if spec.scaling != 1.0:
        weights = weights * spec.scaling
    counted = _load_of(keys[:num_tokens], load) if spec.kind == "gshard" else load
    assignments = (tokens, experts, weights.reshape(-1), kept, slots)
    return _Selection(assignments, load, counted, kept_load, lost)


def _lost(kept: Tensor, is_padding: Tensor | None) -> Tensor:
    """(3,): first choices and other choices that got no slot, and tokens without any expert. kept: (choices, T)."""
    refused = ~kept if is_padding is None else ~(kept | is_padding)
    return torch.stack((refused[0].sum(), refused[1:].sum(), refused.all(0).sum()))


def _load_of(keys: Tensor, like: Tensor) -> Tensor:
    """How many of the keys name each expert of each group, in the shape of `like`: (G, E). The key behind them is
    padding's."""
    return like.new_zeros(like.numel() + 1).scatter_add_(0, keys, torch.ones_like(keys))[:-1].view_as(like)


def _within_best_groups(ranking: Tensor, spec: RouterSpec) -> Tensor:
    """ranking (T, E), -inf outside each token's best `topk_group` of `n_group` groups of experts.

    A group is as good as its best expert (DeepSeek-V2, section 2.2.2), or with sigmoid scores as the sum of its best
    two (DeepSeek-V3, section 2.1.2).
    """
    grouped = ranking.view(ranking.size(0), spec.n_group, -1)
    counted = min(2, grouped.size(-1)) if spec.score == "sigmoid" else 1
    best = _best(grouped.topk(counted, dim=-1).values.sum(-1), spec.topk_group)
    excluded = torch.ones(grouped.shape[:2], dtype=torch.bool, device=ranking.device).scatter_(1, best, False)
    return grouped.masked_fill(excluded.unsqueeze(-1), float("-inf")).flatten(1)


def _normalised(weights: Tensor) -> Tensor:
    """(choices, T), normalised to sum 1 for each token. A single choice keeps its score instead: otherwise the router
    would get no gradient (Fedus et al. 2021, section 2.1)."""
    return weights / weights.sum(0).clamp(min=LEAST_SUM)


def _best(ranking: Tensor, choices: int) -> Tensor:
    """int64 (T, choices): each token's experts, the best first. Several times faster than a sort on a CPU."""
    best = [ranking.argmax(-1, keepdim=True)]
    if choices > 1:
        left = ranking.clone()
        for _ in range(choices - 1):
            left.scatter_(1, best[-1], float("-inf"))
            best.append(left.argmax(-1, keepdim=True))
    return torch.cat(best, dim=1)


def _slots(keys: Tensor, num_keys: int, priorities: Tensor | None) -> tuple[Tensor, Tensor]:
    """(each assignment's number among those of its key, the count of each key), both int64.

    Numbers follow the order of `keys`, or descending priority. They are the counters of Algorithm 1, which count
    dropped assignments too.
    """
    if priorities is None:
        ordered, order = torch.sort(keys, stable=True)
    else:
        by_priority = torch.sort(priorities, descending=True, stable=True).indices
        ordered, order = torch.sort(keys[by_priority], stable=True)
        order = by_priority[order]
    bounds = torch.searchsorted(ordered, torch.arange(num_keys + 1, device=keys.device))  # bincount waits for the GPU
    numbers = torch.arange(keys.numel(), device=keys.device) - bounds[ordered]
    return torch.empty_like(keys).scatter_(0, order, numbers), bounds.diff()


def _experts_choose(
    scores: Tensor, ranking: Tensor, spec: RouterSpec, num_groups: int, capacity: int, is_padding: Tensor | None
) -> _Selection:
    """Assign to every expert the `capacity` tokens of each group that have the best scores for it.

    A token's weights are its scores (Zhou et al. 2022), divided by the number of its experts unless renormalise=none
    (Mesh-TensorFlow). If they were normalised to sum 1, a token with one expert would give the router no gradient.
    """
    num_tokens, num_experts = scores.shape
    group_size, device = num_tokens // num_groups, scores.device
    if is_padding is not None:
        ranking = ranking.masked_fill(is_padding.unsqueeze(1), float("-inf"))
    by_expert = ranking.view(num_groups, group_size, num_experts).transpose(1, 2)  # (G, E, S)
    taken = torch.sort(by_expert, dim=-1, descending=True, stable=True).indices[..., :capacity]
    starts = torch.arange(num_groups, device=device).view(-1, 1, 1) * group_size
    tokens = (taken + starts).reshape(-1)
    experts = torch.arange(num_experts, device=device).view(1, -1, 1).expand_as(taken).reshape(-1)
    weights = scores.reshape(-1).gather(0, tokens * num_experts + experts)
    hits = torch.zeros_like(tokens[:1]).expand(num_tokens).scatter_add(0, tokens, torch.ones_like(tokens))
    if spec.renormalise != "none":
        weights = weights / hits[tokens]
    if spec.scaling != 1.0:
        weights = weights * spec.scaling
    kept, unused = torch.ones_like(tokens, dtype=torch.bool), hits == 0
    if is_padding is not None:  # chosen where a group has fewer tokens than slots
        kept, unused = ~is_padding[tokens], unused & ~is_padding
        weights = weights * kept
    slots = torch.arange(capacity, device=device).expand_as(taken).reshape(-1)
    load = kept.view(taken.shape).sum(-1)
    lost = torch.cat((torch.zeros_like(hits[:1]).expand(2), unused.sum().view(1)))
    assignments = (tokens, experts, weights, kept, slots)
    return _Selection(assignments, load, load, load.sum(0), lost)
