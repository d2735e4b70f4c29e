"""Gradients collected in buckets while backward produces them; a finished bucket is reduced under the rest of backward.

The reason for an own reducer: torch's DDP averages by itself, and lives neither under pipeline schedules nor with
backward passes for inputs and weights apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from parallelrun import torch_private
from parallelrun.comm import Waitable
from parallelrun.plan.structure import Plan


@dataclass(eq=False)
class Slot:
    """One parameter's place in a bucket: `pieces(gradient)` pairs each part of the buffer with what goes there."""

    parameter: nn.Parameter
    pieces: Callable[[Tensor], list[tuple[Tensor, Tensor]]]
    filled: bool = False


class Bucket:
    """A flat buffer, the slots in it, and how it is sent (`send` starts the exchange of the buffer)."""

    def __init__(self, buffer: Tensor, slots: Sequence[Slot], send: Callable[[], Waitable | None]):
        self.buffer, self.slots = buffer, list(slots)
        self._send = send
        self._work: Waitable | None = None
        self.num_arrived = 0

    def begin(self) -> None:
        """Forget the last step's gradients."""
        self.num_arrived = 0
        for slot in self.slots:
            slot.filled = False
            slot.parameter.grad = None

    def collect(self) -> None:
        """Move what gradients there are into the buffer, adding to those of earlier microbatches."""
        new: list[tuple[Tensor, Tensor]] = []
        more: list[tuple[Tensor, Tensor]] = []
        for slot in self.slots:
            gradient = slot.parameter.grad
            if gradient is not None:
                (more if slot.filled else new).extend(slot.pieces(gradient))
                slot.filled = True
                slot.parameter.grad = None
        with torch.no_grad():
            torch_private.copy_all([place for place, _ in new], [part for _, part in new])
            torch_private.add_all([place for place, _ in more], [part for _, part in more])

    def launch(self) -> None:
        """Start the exchange. What backward did not reach is zero."""
        for slot in self.slots:
            if not slot.filled and slot.parameter.grad is None:
                slot.parameter.grad = torch.zeros_like(slot.parameter)
        self.collect()
        self._work = self._send()

    def wait(self) -> None:
        """Until the exchange is over."""
        assert self._work is not None, "the bucket was not launched"
        self._work.wait()
        self._work = None


class Reducer:
    """Counts backward passes per bucket; launches buckets in order, each when it and all before it are full.

    The order is the same on every rank whatever order autograd runs in: collectives must match. A parameter's hook
    fires at most once in a backward pass, so a bucket is full when it has seen microbatches x parameters of them.
    """

    def __init__(self, buckets: Sequence[Bucket], plan: Plan):
        self.buckets = list(buckets)
        self._num_passes = plan.batch.microbatches
        self._num_launched = 0
        self._armed = False
        if not plan.pipeline.splits_backward:  # then hooks fire for half of the parameters: `launch_rest` takes all
            for bucket in self.buckets:
                hook = self._hook(bucket)
                for slot in bucket.slots:
                    slot.parameter.register_post_accumulate_grad_hook(hook)

    def begin_step(self) -> None:
        """Forget the last step; the next backward passes are counted."""
        for bucket in self.buckets:
            bucket.begin()
        self._num_launched = 0
        self._armed = True

    def launch_rest(self) -> None:
        """Launch what is left."""
        self._armed = False
        for bucket in self.buckets[self._num_launched :]:
            bucket.launch()
        self._num_launched = len(self.buckets)

    def finish(self) -> None:
        """Launch what is left, then wait for all."""
        self.launch_rest()
        for bucket in self.buckets:
            bucket.wait()

    def _hook(self, bucket: Bucket) -> Callable[[Tensor], None]:
        num_slots = len(bucket.slots)
        num_expected = num_slots * self._num_passes

        def arrived(_: Tensor) -> None:  # runs for every parameter in every backward pass: counting is all it may cost
            if self._armed:
                bucket.num_arrived += 1
                if bucket.num_arrived % num_slots == 0:
                    bucket.collect()
                    if bucket.num_arrived == num_expected:
                        self._launch_full()

        return arrived

    def _is_full(self, bucket: Bucket) -> bool:
        return bucket.num_arrived == len(bucket.slots) * self._num_passes

    def _launch_full(self) -> None:
        while self._num_launched < len(self.buckets) and self._is_full(self.buckets[self._num_launched]):
            self.buckets[self._num_launched].launch()
            self._num_launched += 1
