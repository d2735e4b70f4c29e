"""Which of the GPUs that a process sees is the one of its rank."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """The GPU of one rank. identity: the same for all processes that see it, whatever index each gives it; empty
    where the process sees no GPU. num_visible: GPUs that the process sees."""

    identity: str = ""
    num_bytes: int = 0
    num_visible: int = 0


def index(local_rank: int, num_visible: int) -> int:
    """The index of a rank's GPU among those that its process sees.

    A launcher may show every process all GPUs of the host (torchrun), or each process its own ones, which then count
    from 0 in each of them (`srun --gpus-per-task=1`).
    """
    return local_rank % max(num_visible, 1)  # without any, torch says what is missing


def of_rank(local_rank: int) -> Gpu:
    """The GPU that the rank of this process would use."""
    import torch

    num_visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not num_visible:
        return Gpu()
    properties = torch.cuda.get_device_properties(index(local_rank, num_visible))
    return Gpu(str(properties.uuid), properties.total_memory, num_visible)
