"""FSDP2 outside its own forward and backward passes."""

from __future__ import annotations

from typing import Any

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


def detach_shards_at_once() -> None:
    """Let `DTensor.detach`, which makes every sharded parameter, detach the local tensor and do nothing else.

    DTensor derives the layout of the result from a trial run with fake tensors, for each shape and mesh anew: 2 ms, of
    which a network of FSDP2 has dozens. A detached tensor has the layout of the tensor.
    """
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    handlers[torch.ops.aten.detach.default] = _detach


def _detach(operation: Any, args: Any, kwargs: dict[str, object]) -> DTensor:
    (tensor,) = args
    return _sharded(operation(tensor._local_tensor), tensor, requires_grad=False)


def empty_parameter(like: nn.Parameter, device: torch.device) -> nn.Parameter:
    """Return an uninitialised parameter on `device`, contiguous as fused optimizers and flat buffers assume; of a
    sharded one without the trial run of `detach_shards_at_once`."""
    plain = like._local_tensor if isinstance(like, DTensor) else like
    local = torch.empty_like(plain, device=device, memory_format=torch.contiguous_format)
    if not isinstance(like, DTensor):
        return nn.Parameter(local, requires_grad=like.requires_grad)
    made: Any = _sharded(local, like, requires_grad=like.requires_grad)
    made._is_param = True  # what `nn.Parameter` marks subclasses of tensors with
    parameter: nn.Parameter = made
    return parameter


def _sharded(local: torch.Tensor, like: DTensor, requires_grad: bool) -> DTensor:
    return DTensor(local, like._spec, requires_grad=requires_grad)
