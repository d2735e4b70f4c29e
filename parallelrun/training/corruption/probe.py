"""A known answer: a small batch with fixed weights, whose bits every later pass on the same devices must repeat.

A device that computes wrong numbers repeats its mistake when it repeats a step. So the probe is compared with itself at
the start of the run: a defect that begins later changes its bits, on one rank of any plan. Forward, backward and the
sums of gradients are those of a step, through the same modules and groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from parallelrun.distributed.sequences import Lane
from parallelrun.planner.facts.corruption_cost import smallest_batch
from parallelrun.training.corruption.record import PassBits, PassRecorder
from parallelrun.training.loop.build import Training
from parallelrun.training.loop.pipeline_runner import build_runner
from parallelrun.training.loop.reader import Reader
from parallelrun.training.loop.step import finish_gradients, forward_backward

# Factors of the loss, one for each batch: a bit that a number of one pass happens to have, another sign or exponent
# likely has not, so that a stuck bit is seen.
SCALES = (1.0, -(2.0**-5), 2.0**5, -1.0, 2.0**-3, -(2.0**3), 2.0**-7, -(2.0**7))
NUM_BATCHES = len(SCALES)
Answer = tuple[tuple[list[int], list[str]], tuple[Lane, ...]]  # what differs (see `PassBits.differing`), the lanes


class Probe:
    """Keeps the weights with which the run began, in host memory, a few small batches, and the bits that they give.

    known: the bits of each batch. repeats: whether a second pass at the start has given the same bits; a probe that
    does not repeat itself is unused.
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
        _, *self.known, again = self._all([0, *range(NUM_BATCHES), 0])
        self.repeats = again.differing(self.known[0]) == ([], [])

    def answers(self, numbers: Sequence[int]) -> list[Answer]:
        """Compute the batches of these numbers again; return what differs on this rank, and the lanes. Collective."""
        return [(bits.differing(self.known[number]), bits.lanes) for number, bits in zip(numbers, self._all(numbers))]

    def _all(self, numbers: Sequence[int]) -> list[PassBits]:
        """Compute batches with the first weights; return the bits of each pass."""
        with self._fixed_weights():
            return [self._run(number) for number in numbers]

    def _run(self, number: int) -> PassBits:
        """Return the bits of a pass over a batch. Collective. Gradients are lost, weights stay."""
        training = self._training
        with PassRecorder(training.mesh) as recorder:
            forward_backward(training, number + 1, SCALES[number])
            finish_gradients(training)
        bits = recorder.bits(training)
        training.statistics.finish_step(False)
        training.routing.finish_step(False)
        training.data.drop_step()
        return bits

    @contextmanager
    def _fixed_weights(self) -> Iterator[None]:
        self._training.data.drop_step()  # one whose update was skipped would end in `finish_update`
        self._exchange()
        yield
        self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        """Exchange the weights and their copies."""
        for weight, copy in zip(self._weights, self._copies):
            present = weight.clone()
            weight.copy_(copy)
            copy.copy_(present)
        self._training.data.finish_update()
