"""The c10d backend `shm`: collectives and messages between CPU ranks of one host, through shared memory.

Written here because no maintained library does it for CPU tensors on torch 2.11 and 2.13: oneCCL's bindings are
discontinued, MPI and UCC need a torch built from source, DeepSpeed's, vLLM's and gloo's shared memory serves
all-reduce only.

Each process has one anonymous arena (`arena`). Peers map it through /proc/<pid>/fd, so it has no name and disappears
with the last process, however that ends. A collective is posted when it is called: the caller's part is copied into its
arena. It completes while its process waits (`engine`), which advances all outstanding operations of the process. Sums
are in rank order, and equal on every rank. A process that waits for several others is woken by the last (`channel`).
Where ranks share cores, the last one also computes the sum of a small all-reduce, which the others copy.

A group whose ranks are on several hosts, or cannot map each other's memory, uses gloo (`joining`).
"""

from __future__ import annotations

from typing import Any

BACKEND = "shm"
HOST_VARIABLE = "PARALLELRUN_SIMULATED_HOST"  # ranks of a simulated host; tests and `emulate=true` set it


def register() -> str:
    """Register the backend with torch, once; return its name."""
    import torch.distributed as dist

    from parallelrun.distributed.shared_memory.joining import create_group

    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, create_group, extended_api=True, devices=["cpu"])
    return BACKEND


def is_ours(process_group: Any) -> bool:
    """Return whether the operations of a process group are those of this package."""
    from parallelrun.distributed.shared_memory.group import SharedMemoryGroup

    return isinstance(process_group, SharedMemoryGroup)


def carrier(process_group: Any) -> str:
    """Return what carries the collectives of a process group on CPU: shm or gloo."""
    return BACKEND if is_ours(process_group) else "gloo"


def finish(timeout_s: float = 60.0) -> None:
    """Complete the operations of this process that nobody has waited for, since its peers may need its part in them.

    A rank calls this before it blocks for long outside collectives. Returns early if a peer has ended.
    """
    from parallelrun.distributed.shared_memory.engine import existing

    engine = existing()
    if engine is not None:
        engine.finish(timeout_s)


def refusal(process_group: Any) -> str:
    """Return why a process group of this backend uses gloo; empty if it does not."""
    from torch.distributed.distributed_c10d import PrefixStore

    from parallelrun.distributed.shared_memory.joining import REFUSED

    store = process_group.get_group_store()
    if not is_ours(process_group):
        store = PrefixStore("cpu/", store)  # as torch does for the backend of a type of device
    return store.get(REFUSED).decode() if store.check([REFUSED]) else ""


def keep_out_of_graphs() -> None:
    """Let torch.compile break its graphs at operations in shared memory. Call it before compiling what issues them."""
    import torch

    from parallelrun.distributed.shared_memory.group import SharedMemoryGroup
    from parallelrun.distributed.shared_memory.named_group import is_operation
    from parallelrun.distributed.shared_memory.work import SharedMemoryWork

    methods = [(SharedMemoryGroup, name) for name, method in vars(SharedMemoryGroup).items() if is_operation(method)]
    for owner, name in (*methods, (SharedMemoryWork, "wait")):
        if not hasattr(getattr(owner, name), "compiled_around"):
            outside = torch.compiler.disable(getattr(owner, name))
            outside.compiled_around = True
            setattr(owner, name, outside)
