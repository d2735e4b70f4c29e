"""The share of this host's cores and GPUs for one of several runs that another program starts side by side.

Without it each run would start as many threads as there are cores, and use the same first GPUs.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from parallelrun.launch.host.environment import num_cores, visible_gpus

Item = TypeVar("Item")
_held: dict[Path, int] = {}  # folder of the locks -> the descriptor that holds this process's one


def part(items: Sequence[Item], index: int, parts: int) -> Sequence[Item]:
    """The `index`-th of `parts` equal parts; where there are fewer items than parts, some have the same one."""
    size = max(1, len(items) // parts)
    start = index * size % max(1, len(items))
    return items[start : start + size]


def limit(folder: Path, parts: int) -> int:
    """Limit this process, and those that it starts, to a share of the cores and GPUs that no other process has.

    parts: how many processes share the host. Processes tell each other through locks in `folder`, which end with them;
    where more come than `parts`, they share. Return the index of the share. A second call changes nothing.
    """
    if folder in _held:
        return 0
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    index = next((number for number in range(parts) if _take(folder, number)), os.getpid() % parts)
    cores = sorted(os.sched_getaffinity(0))[: num_cores()]
    os.sched_setaffinity(0, part(cores, index, parts))
    if gpus := visible_gpus():
        selected = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = selected.split(",")[:gpus] if selected else [str(number) for number in range(gpus)]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(part(names, index, parts))
    return index


def _take(folder: Path, number: int) -> bool:
    """Lock the share with this number, if no other process has it."""
    descriptor = os.open(folder / f"share-{number}", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return False
    _held[folder] = descriptor
    return True
