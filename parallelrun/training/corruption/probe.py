"""A known answer: a small batch with fixed weights, whose bits every later pass on the same devices must repeat.

A device that computes wrong numbers repeats its mistake when it repeats a step. So the probe is compared with itself at
the start of the run: a defect that begins later changes its bits, on one rank of any plan. Forward, backward and the
sums of gradients are those of a step, through the same modules and groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from parallelrun.planner.facts.corruption_cost import smallest_batch
from parallelrun.training.corruption.blame import Difference
from parallelrun.training.corruption.record import PassBits, bits_of_pass
from parallelrun.training.loop.build import Training
from parallelrun.training.loop.pipeline_runner import build_runner
from parallelrun.training.loop.reader import Reader

# Factors of the loss, one for each batch: a bit that a number of one pass happens to have, another sign or exponent
# likely has not, so that a stuck bit is seen.
SCALES = (1.0, -(2.0**-5), 2.0**5, -1.0, 2.0**-3, -(2.0**3), 2.0**-7, -(2.0**7))
NUM_BATCHES = len(SCALES)


class Probe:
    """Keeps the weights with which the run began, in host memory, a few small batches, and the bits that they give.

    repeats: whether a second pass at the start has given the same bits; a probe that does not repeat itself is unused.
    """

    def __init__(self, training: Training):
        plan = smallest_batch(training.config, training.plan)
        first = training.reader.samples
        reader = Reader(first.split, first.sampler, plan, training.mesh)
        runner = build_runner(training.model_parts, plan, training.mesh)
        self._training = replace(training, plan=plan, reader=reader, runner=runner)
        self._weights = [parameter.tensor.detach() for parameter in training.held]
        self._copies = [weight.to("cpu", copy=True) for weight in self._weights]
        # The first pass of a pipeline sends more messages: the stages agree on shapes.
        _, *self._expected, again = self._run([0, *range(NUM_BATCHES), 0])
        self.repeats = not again.compared(self._expected[0])

    def answers(self, numbers: Sequence[int]) -> list[Difference]:
        """Compute the batches of these numbers again; return how each differs on this rank. Collective."""
        return [bits.compared(self._expected[number]) for number, bits in zip(numbers, self._run(numbers))]

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
