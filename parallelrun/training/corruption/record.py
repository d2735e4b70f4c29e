"""The bits of one forward and backward pass on one rank: what it gave to other ranks, its gradients and its loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from parallelrun.distributed.comm.counter import Contributions
from parallelrun.distributed.mesh import Mesh
from parallelrun.distributed.sequences import Lane
from parallelrun.training.corruption.digests import digest_of_all, digests
from parallelrun.training.loop.build import Training


@dataclass(frozen=True)
class PassBits:
    """lanes: of each contribution, in order; given: a digest of each contribution; results: of each of `names`."""

    lanes: tuple[Lane, ...]
    given: Tensor
    names: tuple[str, ...]
    results: Tensor

    def differing(self, other: PassBits) -> tuple[list[int], list[str]]:
        """Return the numbers of the contributions and the names of the results whose bits are not those of `other`.

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
        same_results = (self.results == other.results).tolist()
        return numbers, [name for name, is_same in zip(self.names, same_results) if not is_same]


class PassRecorder(Contributions):
    """Records a pass that runs while it is entered; `bits` is called when the gradients are final."""

    def __init__(self, mesh: Mesh):
        super().__init__(mesh, torch.no_grad()(digest_of_all))

    @torch.no_grad()
    def bits(self, training: Training) -> PassBits:
        """Return the bits of the pass, in host memory."""
        device = training.mesh.device  # the bits of no tensors are on the CPU
        sent = [bits.to(device) for _, bits in self.contributions]
        gradients = [(f"the gradient of {p.name}", p.tensor.grad) for p in training.parameters]
        results = {name: gradient for name, gradient in gradients if gradient is not None}
        if training.runner.loss_sum is not None:
            results["the loss"] = training.runner.loss_sum
        stacked = torch.stack(sent) if sent else torch.zeros(0, dtype=torch.int64)
        lanes = tuple(lane for lane, _ in self.contributions)
        return PassBits(lanes, stacked.cpu(), tuple(results), digests([*results.values()]).cpu())
