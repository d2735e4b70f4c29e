"""Gradients collected in buckets while backward produces them; a finished bucket is reduced under the rest of backward.

The reason for an own reducer: torch's DDP averages by itself, and lives neither under pipeline schedules nor with
backward passes for inputs and weights apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallelrun.plan.structure import Plan

# Under these schedules torch computes weight gradients apart from the backward pass, and a parameter's hook fires for
# half of them: their gradients are taken when the schedule is done.
WITHOUT_HOOKS = ("zero_bubble", "zbv")


@dataclass(eq=False)
class Slot:
    """One parameter's place in a bucket: `pieces(gradient)` pairs each part of the buffer with what goes there."""

    parameter: nn.Parameter
    pieces: Callable[[Tensor], list[tuple[Tensor, Tensor]]]
    passes: int = 0
    filled: bool = False

    @torch.no_grad()
    def take(self) -> None:
        """Move the parameter's gradient into the bucket, or add it to what is there."""
        gradient = self.parameter.grad
        if gradient is None:
            return
        for place, part in self.pieces(gradient):
            if self.filled:
                place.add_(part)
            else:
                place.copy_(part)
        self.filled = True
        self.parameter.grad = None

    @torch.no_grad()
    def clear(self) -> None:
        """Zeros: backward did not reach this parameter."""
        for place, _ in self.pieces(torch.zeros_like(self.parameter)):
            place.zero_()


class Bucket:
    """A flat buffer, the slots in it, and how it is sent (`send` starts the exchange of the buffer)."""

    def __init__(self, buffer: Tensor, slots: Sequence[Slot], send: Callable[[], dist.Work]):
        self.buffer, self.slots = buffer, list(slots)
        self._send = send
        self._work: dist.Work | None = None
        self.num_missing = len(self.slots)

    def begin(self) -> None:
        self.num_missing = len(self.slots)
        for slot in self.slots:
            slot.passes, slot.filled = 0, False
            slot.parameter.grad = None

    def launch(self) -> None:
        """Start the exchange."""
        for slot in self.slots:
            slot.take()
            if not slot.filled:
                slot.clear()
        self._work = self._send()

    def wait(self) -> None:
        assert self._work is not None, "the bucket was not launched"
        self._work.wait()
        self._work = None


class Reducer:
    """Counts backward passes per parameter; launches buckets in order, each when it and all before it are full.

    The order is the same on every rank whatever order autograd runs in: collectives must match.
    """

    def __init__(self, buckets: Sequence[Bucket], plan: Plan):
        self.buckets = list(buckets)
        self._num_passes = plan.batch.microbatches
        self._num_launched = 0
        self._armed = False
        if plan.pipeline.kind not in WITHOUT_HOOKS:
            for bucket in self.buckets:
                for slot in bucket.slots:
                    slot.parameter.register_post_accumulate_grad_hook(self._hook(bucket, slot))

    def begin_step(self) -> None:
        """Forget the last step; the next backward passes are counted."""
        for bucket in self.buckets:
            bucket.begin()
        self._num_launched = 0
        self._armed = True

    def finish(self) -> None:
        """Launch what is left, then wait for all."""
        self._armed = False
        for bucket in self.buckets[self._num_launched :]:
            bucket.launch()
        self._num_launched = len(self.buckets)
        for bucket in self.buckets:
            bucket.wait()

    def _hook(self, bucket: Bucket, slot: Slot) -> Callable[[Tensor], None]:
        def arrived(_: Tensor) -> None:
            if not self._armed:
                return
            slot.take()
            slot.passes += 1
            if slot.passes == self._num_passes:
                bucket.num_missing -= 1
                if bucket.num_missing == 0:
                    self._launch_full()

        return arrived

    def _launch_full(self) -> None:
        while self._num_launched < len(self.buckets) and self.buckets[self._num_launched].num_missing == 0:
            self.buckets[self._num_launched].launch()
            self._num_launched += 1
