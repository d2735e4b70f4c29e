"""The default store of a rendezvous, and gloo's own implementation of a group."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist


def default_store() -> Any:
    """Return the store of the rendezvous. It carries small values where a collective might match a wrong one."""
    return dist.distributed_c10d._get_default_store()


def gloo_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Return gloo's implementation of a group, for a backend that uses it."""
    from torch.distributed import ProcessGroupGloo

    return ProcessGroupGloo(store, rank, size, timeout=timeout)
