"""The runtime of zero2: every backward pass reduces its gradients into this rank's shards and frees the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from parallelrun.distributed import torch_private

from ..common.buckets import MAX_PENDING
from ..common.reducer import GradientBucket
from ..common.zero_runtime import Chunks, PendingExchanges, ZeRORuntime


class TransientBucket(GradientBucket):
    """A bucket whose buffer exists only while it is reduced."""

    def __init__(self, chunks: Chunks, pending: PendingExchanges):
        super().__init__([chunk.weight for chunk in chunks.weights])
        self._chunks, self._pending = chunks, pending

    def launch(self, number: int) -> None:
        self._pending.start(lambda: self._reduce(first=number == 0))

    def wait(self) -> None:
        self._pending.wait()

    def _reduce(self, first: bool) -> Callable[[], None]:
        """Start the sum of the weights' gradients and free them. The result waits and adds the sum to the shards, or,
        in the first pass of a step, overwrites them."""
        buffer, gradients = self._collected(), self._chunks.gradients
        for weight in self.weights:
            weight.grad = None
        total = gradients if first else torch.empty_like(gradients)
        work = self._chunks.reduce(total, buffer)

        def finish() -> None:
            work.wait()
            if not first:
                gradients.add_(total)

        return finish

    def _collected(self) -> Tensor:
        """A buffer with the weights' gradients. Nothing else refers to these afterwards, so that they can be freed."""
        buffer = self._chunks.new_buffer()
        pairs = [
            pair
            for chunk, regions in zip(self._chunks.weights, self._chunks.regions(buffer))
            if chunk.weight.grad is not None
            for pair in chunk.pieces(regions, chunk.weight.grad)
        ]
        with torch.no_grad():
            torch_private.copy_all([target for target, _ in pairs], [part for _, part in pairs])
        return buffer


class ZeRO2Runtime(ZeRORuntime):
    """Reduce-scatters every bucket in every backward pass."""

    max_pending = MAX_PENDING

    def bucket(self, chunks: Chunks) -> TransientBucket:
        return TransientBucket(chunks, self.pending)

    def orders(self, stages: Sequence[int]) -> Iterable[list[GradientBucket]]:
        """By stage: the passes of a rank's stages alternate in the order of the schedule, the same on all replicas."""
        by_stage: dict[int, list[GradientBucket]] = {}
        for stage, bucket in zip(stages, self._buckets):
            by_stage.setdefault(stage, []).append(bucket)
        return by_stage.values()


RUNTIME = ZeRO2Runtime
