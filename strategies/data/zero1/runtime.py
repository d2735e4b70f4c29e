"""The runtime of zero1: a bucket's buffer collects a step's gradients and, after the update, carries the new chunks."""

from __future__ import annotations

from functools import partial

from ..common.reducer import FlatBucket, Slot
from ..common.zero_runtime import Chunks, ZeRORuntime


class ZeRO1Runtime(ZeRORuntime):
    """Reduce-scatters every bucket once a step, when all microbatches have added to it."""

    def bucket(self, chunks: Chunks) -> FlatBucket:
        buffer = chunks.buffer = chunks.new_buffer()
        pairs = zip(chunks.weights, chunks.regions(buffer))
        slots = [Slot(chunk.weight, partial(chunk.pieces, regions)) for chunk, regions in pairs]
        return FlatBucket(buffer, slots, partial(chunks.reduce, chunks.gradients, buffer))


RUNTIME = ZeRO1Runtime
