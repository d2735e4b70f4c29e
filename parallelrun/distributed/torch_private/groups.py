"""The default store of a rendezvous, and gloo's own implementation of a group."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def default_store() -> Any:
    """Return the store of the rendezvous. It carries small values where a collective might match a wrong one."""
    return dist.distributed_c10d._get_default_store()


def process_groups() -> list[tuple[Any, tuple[int, ...]]]:
    """Return the process groups of which this rank is a member, with their ranks. torch lists them privately only."""
    if not dist.is_initialized():
        return []
    groups = list(dist.distributed_c10d._world.pg_map)
    return [(group, tuple(dist.get_process_group_ranks(group))) for group in groups]


def num_collectives(group: Any) -> int:
    """Return how many collectives this rank has issued in a group of torch's own; 0 if its backend does not count."""
    try:
        if group.name() == "custom":  # gloo's group in a backend of ours: torch asks built-in ones alone
            group = group._get_backend(torch.device("cpu"))
        return int(group._get_sequence_number_for_group())
    except RuntimeError:
        return 0


def device_for_objects(group: Any) -> torch.device:
    """Return where the tensors of small messages in a group must be. torch decides by a group's backends, privately."""
    return torch.device(dist.distributed_c10d._get_object_coll_device(group))


def gloo_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Return gloo's implementation of a group, for a backend that uses it."""
    from torch.distributed import ProcessGroupGloo

    return ProcessGroupGloo(store, rank, size, timeout=timeout)
