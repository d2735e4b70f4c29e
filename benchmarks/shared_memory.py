"""Shared memory against gloo between ranks of one host: each collective, paired.

    python -m benchmarks.shared_memory                                    # at 2 and 4 ranks
    python -m benchmarks.shared_memory --case all_reduce --pairs 30 --ranks 2

Both sides run in the same processes and alternate: one group uses shared memory, the other gloo. Sizes
are the bytes of the full-size buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.pairs import compare, on_ranks, read_arguments, time_pairs
from parallelrun.distributed import shared_memory

BYTES = {"4K": 2**12, "256K": 2**18, "16M": 2**24}


def _all_reduce(group: Any, tensor: torch.Tensor, parts: torch.Tensor) -> None:
    dist.all_reduce(tensor, group=group)


def _all_gather(group: Any, tensor: torch.Tensor, parts: torch.Tensor) -> None:
    dist.all_gather_into_tensor(tensor, parts[dist.get_rank()], group=group)


def _reduce_scatter(group: Any, tensor: torch.Tensor, parts: torch.Tensor) -> None:
    dist.reduce_scatter_tensor(parts[dist.get_rank()], tensor, group=group)


def _all_to_all(group: Any, tensor: torch.Tensor, parts: torch.Tensor) -> None:
    dist.all_to_all_single(parts.view(-1), tensor, group=group)


def _broadcast(group: Any, tensor: torch.Tensor, parts: torch.Tensor) -> None:
    dist.broadcast(tensor, 0, group=group)


def _messages(group: Any, tensor: torch.Tensor, parts: torch.Tensor) -> None:
    """From every rank to the next one."""
    rank, world = dist.get_rank(), dist.get_world_size()
    received = dist.irecv(parts.view(-1), (rank - 1) % world, group=group)
    sent = dist.isend(tensor, (rank + 1) % world, group=group)
    assert sent is not None and received is not None
    received.wait()
    sent.wait()


COLLECTIVES: dict[str, Callable[[Any, torch.Tensor, torch.Tensor], None]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "messages": _messages,
}
_REPEATED = {"4K": 20, "256K": 10, "16M": 1}  # calls that are timed together


def _collective(name: str, size: str, pairs: int, warmup: int) -> dict[str, Any]:
    """One rank: the same call over both groups."""
    shared, gloo = dist.new_group(backend=shared_memory.register()), dist.new_group(backend="gloo")
    assert shared_memory.carrier(shared) == "shm"
    tensor = torch.zeros(BYTES[size] // 4)  # zeros: summed again and again, other numbers would overflow
    parts = torch.zeros(dist.get_world_size(), tensor.numel() // dist.get_world_size())

    def calls(group: Any) -> None:
        for _ in range(_REPEATED[size]):
            COLLECTIVES[name](group, tensor, parts)

    times = time_pairs(partial(calls, shared), partial(calls, gloo), pairs, warmup)
    return {"times": {side: [seconds / _REPEATED[size] for seconds in values] for side, values in times.items()}}


def main() -> None:
    arguments = read_arguments(__doc__, "shared_memory", COLLECTIVES, BYTES, ranks="2,4")
    worlds, sizes = [int(world) for world in arguments.ranks.split(",")], arguments.size.split(",")
    cells = [(case, world, size) for case in arguments.case.split(",") for world in worlds for size in sizes]
    rows = (
        {"case": f"{case}, {world} ranks", "ranks": world, "size": size}
        | on_ranks(world, _collective, case, size, arguments.pairs, arguments.warmup)
        for case, world, size in cells
    )
    compare(arguments.name, ((row, None) for row in rows))


if __name__ == "__main__":
    main()
