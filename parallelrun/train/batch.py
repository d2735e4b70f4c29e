"""The samples of one data replica in one step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Samples along dim 0, on the device. inputs and targets are None on ranks that do not need them.

    inputs: (n, *sample_shape), int64 tokens or features in the compute dtype. targets: (n, *target_shape), int64, below
    0 where ignored. sample_ids: (n,) int64, the samples' global numbers, known to every rank.
    """

    inputs: Tensor | None
    targets: Tensor | None
    sample_ids: Tensor

    def __len__(self) -> int:
        return self.sample_ids.shape[0]

    def microbatch(self, index: int, size: int) -> Batch:
        """Microbatch `index` of `size` consecutive samples, as views."""
        start, stop = index * size, (index + 1) * size
        assert stop <= len(self), f"microbatch {index} of {size} samples lies outside a batch of {len(self)}"
        return Batch(
            inputs=None if self.inputs is None else self.inputs[start:stop],
            targets=None if self.targets is None else self.targets[start:stop],
            sample_ids=self.sample_ids[start:stop],
        )
