"""The bits of one forward and backward pass on one rank: what it gave to other ranks, and its final gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parallelrun.comm.counter import Contributions
from parallelrun.mesh import Mesh
from parallelrun.sequences import Lane
from parallelrun.train.build import Training
from parallelrun.train.corruption.digests import digests


@dataclass(frozen=True)
class PassBits:
    """lanes: of each contribution, in order; given: a digest of each contribution; gradients: of each parameter."""

    lanes: tuple[Lane, ...]
    given: Tensor
    gradients: Tensor

    def differing(self, other: PassBits) -> tuple[list[int], list[int]]:
        """Return the numbers of the contributions and of the parameters whose bits are not those of `other`.

        The first contribution that only one of them has differs, and all after it.
        """
        common = min(len(self.lanes), len(other.lanes))
        same = [
            lane == theirs and equal
            for lane, theirs, equal in zip(
                self.lanes, other.lanes, (self.given[:common] == other.given[:common]).tolist()
            )
        ]
        numbers = [number for number, is_same in enumerate(same) if not is_same]
        if len(self.lanes) != len(other.lanes):
            numbers += range(common, max(len(self.lanes), len(other.lanes)))
        return numbers, (self.gradients != other.gradients).nonzero().flatten().tolist()


class PassRecorder(Contributions):
    """Records a pass that runs while it is entered; `bits` is called when the gradients are final."""

    def __init__(self, mesh: Mesh):
        super().__init__(mesh, _digest_of_all)

    @torch.no_grad()
    def bits(self, training: Training) -> PassBits:
        """Return the bits of the pass, in host memory."""
        given = [measured for _, measured in self.found]
        gradients = [p.tensor.grad for p in training.parameters if p.tensor.grad is not None]
        stacked = torch.stack(given) if given else torch.zeros(0, dtype=torch.int64)
        return PassBits(tuple(lane for lane, _ in self.found), stacked.cpu(), digests(gradients).cpu())


@torch.no_grad()
def _digest_of_all(tensors: Sequence[Tensor]) -> Tensor:
    """Return one digest of several tensors: the sum of theirs, which is 0 without tensors."""
    found = digests(tensors)
    return found.sum()
