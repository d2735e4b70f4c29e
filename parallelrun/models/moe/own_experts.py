"""Experts of somebody else's module, as in transformers: one tensor for each projection, the expert its first dim.

Their own router chooses; a token dispatcher may send the rows to other ranks, each of which has some of the experts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from parallelrun.base.errors import ConfigError, Problem
from parallelrun.config.schema.model_schema import RouterConfig
from parallelrun.models import layers
from parallelrun.models.moe.experts import grouped_multiply
from parallelrun.models.moe.routing import Routing
from parallelrun.planner.model.model_spec.router import OWN, RouterSpec

ROLE = "expert"
GATE_UP, DOWN = "gate_up_proj", "down_proj"
Dispatch = Callable[[Tensor, Routing, Any, None], tuple[Tensor, Tensor | None]]
# What transformers says of a class's tensors (`use_experts_implementation`), and the only layout that is split.
_LAYOUT = {"has_gate": True, "is_concatenated": True, "is_transposed": False, "has_bias": False,
           "has_post_expert_norm": False}  # fmt: skip


def has_experts(part: nn.Module) -> bool:
    """Whether a module holds the weights of several experts, in any layout."""
    return hasattr(part, "num_experts") and any(p.dim() == 3 for p in part.parameters(recurse=False))


def unfit(part: nn.Module) -> str:
    """Why the experts of a module cannot be spread over ranks; empty if they can."""
    weights = dict(part.named_parameters())
    if weights.keys() != {GATE_UP, DOWN} or any(weight.dim() != 3 for weight in weights.values()):
        return f"its weights are {', '.join(weights) or 'none'}, not {GATE_UP} and {DOWN} with a dim of experts"
    if differing := [name for name, value in _LAYOUT.items() if getattr(part, name, value) is not value]:
        return f"its weights have another layout ({differing[0]}={getattr(part, differing[0])})"
    return "" if callable(getattr(part, "_apply_gate", None)) else "it does not say how gate and up are combined"


def is_own(part: nn.Module) -> bool:
    """Whether a module has the role of experts, and is not ours."""
    return layers.role_of(part) == ROLE and not isinstance(part, layers.RoleLayer)


def watched(module: nn.Module) -> tuple[int, list[int]]:
    """The number of experts of a layer, and a list to which the number that each token chooses is added when the module
    runs; 0 and an empty list without experts. Raises ConfigError if layers have different numbers: one ep divides all,
    and a model has one router's settings."""
    parts = {name: part for name, part in module.named_modules() if is_own(part)}
    numbers = {int(part.get_parameter(DOWN).size(0)): name for name, part in parts.items()}
    if len(numbers) > 1:
        different = " and ".join(f"{number} in {name}" for number, name in numbers.items())
        raise ConfigError(Problem(f"layers have different numbers of experts: {different}", "model", kind="not_built"))
    choices = [1] if parts else []
    for part in parts.values():
        part.register_forward_pre_hook(lambda _, inputs: choices.append(inputs[1].shape[-1]))
    return max(numbers, default=0), choices


def router_spec(choices: list[int]) -> RouterSpec | None:
    """The router of a module with experts, of each token's numbers of choices; None without experts."""
    return RouterSpec(**(vars(RouterConfig()) | {"kind": OWN, "top_k": max(choices)})) if choices else None


def run_on_meta(part: nn.Module) -> None:
    """Make a module on the meta device, whose numbers of rows nobody knows, compute as much as with an even load."""
    part.forward = partial(_on_meta, part)


def _on_meta(part: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    num_tokens, choices = top_k_index.shape
    tokens = torch.arange(num_tokens, device=top_k_index.device).repeat(choices)
    rows = hidden_states.index_select(0, tokens)
    opened = part._apply_gate(functional.linear(rows, part.gate_up_proj[0]))
    closed = functional.linear(opened, part.down_proj[0]) * top_k_weights.t().reshape(-1, 1)
    return torch.zeros_like(hidden_states).index_add(0, tokens, closed)


def send(part: nn.Module, dispatch: Dispatch) -> None:
    """Make a module that holds this rank's experts get their rows from all ranks, and return every token's sum."""
    part.forward = partial(_forward, part, dispatch)


def _forward(
    part: Any, dispatch: Dispatch, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """hidden_states (T, hidden), top_k_index and top_k_weights (T, choices): the names that transformers gives them."""
    num_tokens, choices = top_k_index.shape
    tokens = torch.arange(num_tokens, device=top_k_index.device)
    routing = Routing(
        tokens=tokens.repeat(choices),
        experts=top_k_index.clamp(max=part.num_experts - 1).t().flatten(),
        weights=top_k_weights.t().flatten(),
        kept=(top_k_index < part.num_experts).t().flatten(),  # transformers has one number more, for no expert
        slots=torch.zeros_like(tokens).repeat(choices),
        num_tokens=num_tokens,
        num_groups=num_tokens,
        capacity=num_tokens,
        num_experts=part.num_experts,
        auxiliary=None,
        statistics=top_k_weights.detach(),
    )
    return dispatch(hidden_states, routing, partial(_compute, part), None)[0]


def _compute(part: Any, rows: Tensor, counts: Tensor) -> Tensor:
    """rows (n, hidden), sorted by expert, of which each has `counts`; the weights are those of the compute dtype."""
    opened = part._apply_gate(grouped_multiply(rows, part.gate_up_proj, counts))
    return grouped_multiply(opened, part.down_proj, counts)
