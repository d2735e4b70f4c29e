"""Gradients that wait while backward runs, in bytes on a rank: until their bucket is full. Torch-free.

Counted beyond the buckets that a rank always has: backward leaves the gradient of a weight beside the bucket, which
collects all of its gradients when the last one is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from parallelrun.plan.parameters import HeldParameter
from parallelrun.plan.structure import Plan
from parallelrun.precision import BYTES

from .buckets import Filled, exchanged_numel, local_shapes, trained_parameters

Filling = Callable[[list[HeldParameter], list[tuple[int, ...]]], Sequence[Filled]]


class Waiting:
    """The gradients of one rank. `fill` gives its buckets, of the trained parameters and their local shapes."""

    def __init__(self, pp_rank: int, coordinate: dict[str, int], plan: Plan, fill: Filling):
        self._plan, self._pp_rank = plan, pp_rank
        self._trained = trained_parameters(plan, pp_rank)
        self._shapes = local_shapes(self._trained, coordinate, plan)
        self.buckets = list(fill(self._trained, self._shapes))
        self._bucket_of = {index: number for number, one in enumerate(self.buckets) for index in one.indices}
        self._reader = {
            layer.tied: block.name for block in plan.spec.blocks for layer in block.layers if layer.tied is not None
        }

    def sent_bytes(self, number: int) -> int:
        """Of bucket `number` on its way, padded."""
        indices = self.buckets[number].indices
        numel = sum(exchanged_numel(self._trained[i], self._shapes[i], self._plan, padded=True) for i in indices)
        return BYTES[self._plan.precision.reduce] * numel

    def of_stage(self, stage: int) -> list[tuple[int, list[int]]]:
        """Per block of a stage, in forward order, before its backward begins: (bytes beside the buckets, the buckets
        that are full, in that order). Later stages of the rank have left what fills no bucket."""
        each = BYTES[self._plan.precision.stored]
        missing = [len(bucket.indices) for bucket in self.buckets]
        beside = [0] * len(self.buckets)
        full: list[int] = []
        early = 0  # of tied weights, from the block that reads them to the one that holds them
        found: dict[str, tuple[int, list[int]]] = {}
        for own in sorted(self._plan.stages_of(self._pp_rank), key=lambda one: -one.index):
            for block in reversed(own.blocks):
                if own.index == stage:
                    found[block] = sum(beside) + early, [*full]
                for index, held in enumerate(self._trained):
                    size = each * prod(self._shapes[index])
                    reader = self._reader.get(held.name)
                    if reader == block and reader in own.blocks:
                        early += size
                    if held.stage != own.index or held.block != block or index not in self._bucket_of:
                        continue
                    early -= size if reader in own.blocks else 0
                    bucket = self._bucket_of[index]
                    beside[bucket] += size
                    missing[bucket] -= 1
                    if not missing[bucket]:
                        beside[bucket] = 0
                        full.append(bucket)
        return [found[block] for block in self._plan.stages[stage].blocks]

    def stage_of(self, bucket: Filled) -> int:
        """The stage of a bucket that spans no other."""
        return self._trained[bucket.indices[0]].stage
