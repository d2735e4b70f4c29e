"""FSDP2 outside its own forward and backward passes."""

from __future__ import annotations

from torch.distributed.fsdp import FSDPModule


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
    for one in state._state_ctx.all_states:
        groups = getattr(one, "_fsdp_param_groups", None)  # torch 2.11 has one group per state, under another name
        for group in groups if groups is not None else filter(None, [one._fsdp_param_group]):
            group.post_backward()
    state._root_post_backward_final_callback()
