"""A data replica's samples of a step, as tensors on the device: a function of (seed, step, dp coordinate) alone.

`HostSamples` reads a step into host memory. `Reader` has the next steps read in the background (`train/prefetch.py`)
while the current one trains, and copies each to the device.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from parallelrun.data.order import Sampler
from parallelrun.definitions import Split
from parallelrun.mesh import Mesh
from parallelrun.plan.structure import Plan
from parallelrun.train.batch import Batch
from parallelrun.train.prefetch import InBackgroundThread, InWorkerProcesses, ReadAhead

MOST_WORKERS = 4  # per rank, where `dataset.num_workers` does not say: more rarely help one rank


@dataclass(frozen=True)
class HostSamples:
    """The samples [start, stop) of every global batch, in host memory. `samples[step]` is the batch of a step, from 1.

    has_inputs, has_targets: whether this rank needs them. floats: the dtype of inputs that are not token ids.
    """

    split: Split
    sampler: Sampler
    start: int
    stop: int
    has_inputs: bool
    has_targets: bool
    floats: torch.dtype

    def __getitem__(self, step: int) -> Batch:
        indices, sample_ids = self.sampler.indices(step, self.start, self.stop)
        inputs = targets = None
        if self.has_inputs or self.has_targets:
            samples = [self.split.augmented(int(index), int(number)) for index, number in zip(indices, sample_ids)]
            inputs = self._stacked([sample[0] for sample in samples]) if self.has_inputs else None
            targets = self._stacked([sample[1] for sample in samples]) if self.has_targets else None
        return Batch(inputs, targets, torch.from_numpy(np.asarray(sample_ids, dtype=np.int64)))

    def _stacked(self, arrays: list[np.ndarray]) -> Tensor:
        stacked = torch.from_numpy(np.stack(arrays))
        return stacked.to(self.floats if stacked.is_floating_point() else torch.int64)


class Reader:
    """Reads dp coordinate c's contiguous samples [c B/dp, (c+1) B/dp) of every global batch; `replica` gives another c.

    Ranks of the first stage read inputs, ranks of the last stage read targets, each by itself; the others read neither.

    last_step: the step after which nothing is read ahead; 0: nothing ever is, for readers that skip from step to step.
    num_workers: processes that decode, for a split whose samples are files (`decodes_files`); None: the cores that
    the ranks of this host leave, at most 4. Other splits are read ahead by one thread.
    `samples` are what is read, before the device; `seconds` is how long `batch` has kept its caller waiting so far, the
    copy to the device included.
    """

    def __init__(
        self,
        split: Split,
        sampler: Sampler,
        plan: Plan,
        mesh: Mesh,
        replica: int | None = None,
        *,
        last_step: int = 0,
        num_workers: int | None = None,
    ):
        replica = mesh.coordinate.get("dp", 0) if replica is None else replica
        size = plan.batch.replica_batch
        pp_rank = mesh.coordinate.get("pp", 0)
        self.samples = HostSamples(
            split,
            sampler,
            start=replica * size,
            stop=(replica + 1) * size,
            has_inputs=pp_rank == plan.stages[0].pp_rank,
            has_targets=pp_rank == plan.last_stage_pp_rank,
            floats=getattr(torch, plan.precision.compute),
        )
        self._device = mesh.device
        self._ahead = self._read_ahead(last_step, _num_workers(split, num_workers, plan.world))
        self.seconds = 0.0

    def batch(self, step: int) -> Batch:
        """The samples of step `step` (from 1). Raises what reading them raised."""
        began = time.perf_counter()
        samples = self._ahead.take(step) if self._ahead else self.samples[step]
        batch = Batch(self._moved(samples.inputs), self._moved(samples.targets), samples.sample_ids.to(self._device))
        self.seconds += time.perf_counter() - began
        return batch

    def close(self) -> None:
        """End what reads in the background."""
        if self._ahead:
            self._ahead.close()

    def _read_ahead(self, last_step: int, num_workers: int) -> ReadAhead | None:
        if not last_step:
            return None
        pin = self._device.type == "cuda"  # only from pinned memory does a copy run beside the kernels
        reads = self.samples.has_inputs or self.samples.has_targets
        if num_workers and reads:
            return InWorkerProcesses(self.samples, last_step, num_workers, pin)
        return InBackgroundThread(self.samples, last_step, pin) if reads else None

    def _moved(self, tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(self._device, non_blocking=True)


def _num_workers(split: Split, asked: int | None, world: int) -> int:
    if not split.decodes_files:
        return 0
    if asked is not None:
        return asked
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    return max(1, min(MOST_WORKERS, len(os.sched_getaffinity(0)) // local_ranks))
