"""Put a network whose tensor strategy has been placed on the ranks of the expert axis. On meta."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from parallelrun.mesh import Mesh
from parallelrun.models.moe.layer import MoE
from parallelrun.models.network import Network
from parallelrun.plan.structure import ExpertWay, Plan

from .dispatch import Dispatch
from .levels import Levels, levels_of


def place(network: Network, plan: Plan, mesh: Mesh, make: Callable[[ExpertWay, Levels], Dispatch]) -> None:
    """Leave every layer its own experts (parameters uninitialised) and the dispatch that `make` gives, in place."""
    levels = levels_of(plan, mesh)
    for layer in network.modules():
        if isinstance(layer, MoE):
            for name, weight in list(layer.experts.named_parameters()):
                local = weight.new_empty(levels.num_local, *weight.shape[1:])
                setattr(layer.experts, name, nn.Parameter(local, requires_grad=weight.requires_grad))
            layer.dispatch = make(plan.expert, levels)
