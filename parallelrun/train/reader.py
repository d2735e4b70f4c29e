"""A data replica's samples of a step, as tensors on the device: a function of (seed, step, dp coordinate) alone."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from parallelrun.data.order import Sampler
from parallelrun.mesh.runtime import Mesh
from parallelrun.plan.structure import Plan
from parallelrun.train.batch import Batch


class Reader:
    """Reads dp coordinate c's contiguous samples [c B/dp, (c+1) B/dp) of every global batch; `replica` gives another c.

    Ranks of the first stage read inputs, ranks of the last stage read targets, each by itself; the others read neither.
    `seconds` is what reading has taken so far, until the tensors are on their way to the device.
    """

    def __init__(self, split: Any, sampler: Sampler, plan: Plan, mesh: Mesh, replica: int | None = None):
        self._split = split
        # splits that augment give each sample by its global number too: never the same twice, nor by the plan
        self._sample = getattr(split, "augmented", None) or (lambda index, _: split.sample(index))
        self._sampler = sampler
        self._device = mesh.device
        self._replica = mesh.coordinate.get("dp", 0) if replica is None else replica
        self._size = plan.batch.replica_batch
        position = mesh.coordinate.get("pp", 0)
        self._needs_inputs = position == plan.stages[0].position
        self._needs_targets = position == plan.last_stage_position
        self._float = getattr(torch, plan.precision.compute)
        self.seconds = 0.0

    def batch(self, step: int) -> Batch:
        """The samples of step `step` (from 1)."""
        began = time.perf_counter()
        start = self._replica * self._size
        indices, sample_ids = self._sampler.indices(step, start, start + self._size)
        inputs = targets = None
        if self._needs_inputs or self._needs_targets:
            samples = [self._sample(int(index), int(number)) for index, number in zip(indices, sample_ids)]
            inputs = self._tensor([sample[0] for sample in samples]) if self._needs_inputs else None
            targets = self._tensor([sample[1] for sample in samples]) if self._needs_targets else None
        ids = torch.from_numpy(np.asarray(sample_ids, dtype=np.int64)).to(self._device)
        self.seconds += time.perf_counter() - began
        return Batch(inputs, targets, ids)

    def _tensor(self, arrays: list[np.ndarray]) -> torch.Tensor:
        stacked = torch.from_numpy(np.stack(arrays))
        wanted = self._float if stacked.is_floating_point() else torch.int64
        return stacked.to(self._device, wanted, non_blocking=True)
