"""FSDP2 outside its own forward and backward passes."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def fsdp_initialise(root: FSDPModule) -> None:
    """Run the initialisation that FSDP2 otherwise does in its root's first forward.

    It may move shards into padded storage, so an optimizer must take the local shards afterwards.
    """
    root._get_fsdp_state()._lazy_init()


def fsdp_reduce(root: FSDPModule) -> None:
    """Reduce the gradients that the units of an FSDP2 root have accumulated, outside any backward pass.

    `torch.distributed.pipelining` does the same after a schedule.
    """
    state = root._get_fsdp_state()
    for part in state._state_ctx.all_states:
        groups = getattr(part, "_fsdp_param_groups", None)  # torch 2.11 has one group per state, under another name
        for group in groups if groups is not None else filter(None, [part._fsdp_param_group]):
            group.post_backward()
    state._root_post_backward_final_callback()


def empty_parameter(like: nn.Parameter, device: torch.device) -> nn.Parameter:
    """Return an uninitialised parameter on `device`, contiguous as fused optimizers and flat buffers assume."""
    plain = like._local_tensor if isinstance(like, DTensor) else like
    empty = torch.empty_like(plain, device=device, memory_format=torch.contiguous_format)
    if isinstance(like, DTensor):
        empty = DTensor(empty, like._spec, requires_grad=False)
    return nn.Parameter(empty, requires_grad=like.requires_grad)
