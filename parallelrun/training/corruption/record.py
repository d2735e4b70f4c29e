"""The bits of one forward and backward pass on one rank: what it gave to other ranks, its gradients and its loss."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest

import torch

from parallelrun.distributed.comm.counter import Contributions
from parallelrun.distributed.mesh import Mesh
from parallelrun.distributed.sequences import Lane
from parallelrun.training.corruption.blame import Difference
from parallelrun.training.corruption.digests import digest_of_all, digests
from parallelrun.training.loop.build import Training
from parallelrun.training.loop.step import finish_gradients, forward_backward


@dataclass(frozen=True)
class PassBits:
    """given: lane and digest of each contribution to other ranks, in order; results: digests by name."""

    given: list[tuple[Lane, int]]
    results: dict[str, int]

    def compared(self, expected: PassBits) -> Difference:
        """Return how this pass differs. A contribution that only one of the two has differs, too."""
        pairs = enumerate(zip_longest(self.given, expected.given))
        return Difference(
            lanes=[lane for lane, _ in self.given],
            given=[number for number, (ours, theirs) in pairs if ours != theirs],
            results=[name for name, digest in self.results.items() if digest != expected.results.get(name)],
        )


class PassRecorder(Contributions):
    """Records a pass that runs while it is entered; `bits` is called when the gradients are final."""

    def __init__(self, mesh: Mesh):
        super().__init__(mesh, torch.no_grad()(digest_of_all))

    @torch.no_grad()
    def bits(self, training: Training) -> PassBits:
        """Return the bits of the pass, in host memory."""
        sent = [measured.to(training.mesh.device) for _, measured in self.found]  # that of no tensors is on the CPU
        values = torch.stack(sent).tolist() if sent else []
        tensors = {f"the gradient of {p.name}": p.tensor.grad for p in training.parameters}
        results = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        if training.runner.loss_sum is not None:
            results["the loss"] = training.runner.loss_sum
        own = digests([*results.values()]).tolist()
        return PassBits([(lane, value) for (lane, _), value in zip(self.found, values)], dict(zip(results, own)))


def bits_of_pass(training: Training, step: int, loss_scale: float) -> PassBits:
    """Compute the gradients of a step, and forget them. Return the bits of the pass. Collective."""
    with PassRecorder(training.mesh) as recorder:
        forward_backward(training, step, loss_scale)
        finish_gradients(training)
    bits = recorder.bits(training)
    training.statistics.finish_step(False)
    training.routing.finish_step(False)
    training.data.drop_step()
    return bits
