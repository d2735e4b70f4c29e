"""The bytes of a backward pass that takes turns with a forward pass (`PipelineSchedule.overlaps_passes`).

Both stop at the all-to-alls of experts' rows. The forward pass begins; when the backward pass has stopped k times, the
forward pass has come to its stop number k + 1, if it has so many.
"""

from __future__ import annotations

from collections.abc import Sequence

from parallelrun.planner.memory.backward_block import BackwardBlock


def kept_at_stops(blocks: Sequence[BackwardBlock]) -> list[int]:
    """What a forward pass has saved at each of its stops, and at its end. A recomputed block saves its input at its
    begin."""
    kept, sizes = 0, []
    for block in blocks:
        before = kept
        for layer in block.passes:
            if layer.stops:
                sizes.append((before + block.kept if block.again else kept) + block.sending)
            kept += layer.kept
        kept = before + block.kept
    return [*sizes, kept]


def beyond_kept(
    backward: Sequence[BackwardBlock], forward: Sequence[BackwardBlock], produced: Sequence[int], accumulates: bool
) -> int:
    """The peak of a backward pass beyond the saved activations of all microbatches in flight, those of the forward pass
    beside it included. produced: bytes of gradients that stay, by block; accumulates: see `working_bytes`."""
    ahead = kept_at_stops(forward)
    stops = freed = gradients = 0
    sizes = []

    def add(working: int) -> None:
        sizes.append(working + gradients - freed + ahead[min(stops, len(ahead) - 1)] - ahead[-1])

    for block, size in reversed([*zip(backward, produced, strict=True)]):
        if block.again:
            stops += sum(layer.stops for layer in block.passes)
            add(block.again + block.beside + block.forward)
        for layer, working in zip(reversed(block.passes), block.pass_bytes(accumulates), strict=True):
            add(working)
            stops += layer.stops
        freed += block.kept
        gradients += size
    return max(sizes)
