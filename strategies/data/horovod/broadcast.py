"""Everyone starts from worker 0's weights and optimizer state, whatever each has drawn or loaded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from parallelrun import comm
from parallelrun.mesh import Group
from parallelrun.optimizer import Optimizer
from parallelrun.plan.parameters import LocalParameter


@torch.no_grad()
def broadcast_weights(weights: Sequence[Tensor], group: Group) -> None:
    """Overwrite `weights` with those of the group's first member, one message per dtype."""
    for dtype in dict.fromkeys(weight.dtype for weight in weights):
        alike = [weight for weight in weights if weight.dtype == dtype]
        flat = torch.cat([weight.flatten() for weight in alike])
        comm.broadcast(flat, group, "control")
        for weight, part in zip(alike, flat.split([weight.numel() for weight in alike])):
            weight.copy_(part.view_as(weight))


def broadcast_optimizer(optimizer: Optimizer, parameters: Sequence[LocalParameter], group: Group) -> None:
    """Overwrite the optimizer's state, which all members have or none, with that of the group's first member."""
    tensors = [value for p in parameters for _, value in sorted(optimizer.state(p.name).items())]
    if tensors:
        broadcast_weights(tensors, group)
