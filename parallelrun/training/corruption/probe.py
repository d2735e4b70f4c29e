"""The bits of a forward and backward pass on one rank, and a known answer: a pass whose bits must repeat.

A device that computes wrong numbers repeats its mistake when it repeats a step. So a small batch with fixed weights is
compared with itself at the start of the run: a defect that begins later changes its bits, on one rank of any plan.
Forward, backward and the sums of gradients are those of a step, through the same modules and groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import torch

from parallelrun.distributed.comm.counter import Contributions
from parallelrun.distributed.mesh import Mesh
from parallelrun.distributed.sequences import Lane
from parallelrun.planner.facts.corruption_cost import smallest_batch
from parallelrun.training.corruption.blame import Difference
from parallelrun.training.corruption.digests import digests
from parallelrun.training.loop.build import Training
from parallelrun.training.loop.pipeline_runner import build_runner
from parallelrun.training.loop.reader import Reader
from parallelrun.training.loop.step import finish_gradients, forward_backward

# Factors of the loss, one for each batch: a bit that a number of one pass happens to have, another sign or exponent
# likely has not, so that a stuck bit is seen.
SCALES = (1.0, -(2.0**-5), 2.0**5, -1.0, 2.0**-3, -(2.0**3), 2.0**-7, -(2.0**7))
NUM_BATCHES = len(SCALES)


@dataclass(frozen=True)
class PassBits:
    """sent: lane and digests of each contribution to other ranks, in order; results: digests by name."""

    sent: list[tuple[Lane, list[int]]]
    results: dict[str, int]

    def compared(self, expected: PassBits) -> Difference:
        """Return how this pass differs. A contribution that only one of the two has differs, too."""
        pairs = enumerate(zip_longest(self.sent, expected.sent))
        return Difference(
            lanes=[lane for lane, _ in self.sent],
            sent=[number for number, (ours, theirs) in pairs if ours != theirs],
            results=[name for name, digest in self.results.items() if digest != expected.results.get(name)],
        )


class PassRecorder(Contributions):
    """Records a pass that runs while it is entered; `bits` is called when the gradients are final."""

    def __init__(self, mesh: Mesh):
        super().__init__(mesh, torch.no_grad()(digests))

    @torch.no_grad()
    def bits(self, training: Training) -> PassBits:
        """Return the bits of the pass, in host memory."""
        tensors = {f"the gradient of {p.name}": p.tensor.grad for p in training.parameters}
        results = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        if training.runner.loss_sum is not None:
            results["the loss"] = training.runner.loss_sum
        own = digests([*results.values()]).tolist()
        sent = [(lane, measured.tolist()) for lane, measured in self.contributions]
        return PassBits(sent, dict(zip(results, own)))


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


class Probe:
    """Keeps the weights with which the run began and what a compression kept, in host memory, a few small batches,
    and the bits that they give.

    repeats: whether a second pass at the start has given the same bits; a probe that does not repeat itself is unused.
    """

    def __init__(self, training: Training):
        plan = smallest_batch(training.config, training.plan)
        first = training.reader.samples
        reader = Reader(first.split, first.sampler, plan, training.mesh)
        runner = build_runner(training.model_parts, plan, training.mesh)
        self._training = replace(training, plan=plan, reader=reader, runner=runner)
        read = [*training.held]
        if plan.data.saved_bytes(plan):  # of a compression, on which gradients depend
            read += [parameter for parameters in training.data.kept.values() for parameter in parameters]
        self._weights = [parameter.tensor.detach() for parameter in read]
        self._copies = [weight.to("cpu", copy=True) for weight in self._weights]
        # The first pass of a pipeline sends more messages: the stages agree on shapes.
        _, *self._expected, again = self._run([0, *range(NUM_BATCHES), 0])
        self.repeats = not again.compared(self._expected[0])

    def answer(self, number: int) -> Difference:
        """Compute a batch again; return how it differs on this rank. Collective."""
        return self._run([number])[0].compared(self._expected[number])

    def _run(self, numbers: Sequence[int]) -> list[PassBits]:
        """Compute batches with the first weights; return the bits of each pass."""
        self._training.data.drop_step()  # one whose update was skipped would end in `finish_update`
        self._exchange()
        passes = [bits_of_pass(self._training, number + 1, SCALES[number]) for number in numbers]
        self._exchange()
        return passes

    @torch.no_grad()
    def _exchange(self) -> None:
        """Exchange the weights and their copies."""
        for weight, copy in zip(self._weights, self._copies):
            present = weight.clone()
            weight.copy_(copy)
            copy.copy_(present)
        self._training.data.finish_update()
