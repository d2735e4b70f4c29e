"""A look at all candidates of a space, by lower bounds of blocks alone."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from functools import cached_property
from operator import itemgetter
from typing import NamedTuple

from parallelrun.config.schema.run_schema import DataStrategyConfig
from parallelrun.planner.search.bounds import Bounds, with_plain_schedule
from parallelrun.planner.search.fitting_plans import NEVER
from parallelrun.planner.search.legal import Legal, LegalGroup

MOST_SIFTED = 2000  # candidates up to which bounds are computed of those, too, that need too much memory for certain


class CandidateRow(NamedTuple):
    """Candidates that differ in the data strategy alone. least_s: a lower bound of a step."""

    group: LegalGroup
    micro_batch: int
    recompute: str
    least_s: float

    @property
    def shape(self) -> tuple[int, int, int, int, int, str]:
        """The degrees and the kind of tensor layout, by which plans are distinguished where few are shown."""
        group = self.group
        return group.pp, group.dp, group.cp, group.tp, group.ep, group.tensor.kind


class RowMemory(NamedTuple):
    """Lower bounds of the memory of a row. datas: data strategies with the bytes of the rank that holds most, the least
    first; none where saved activations alone do not fit and the space is large. fitting: how many of them may fit."""

    datas: list[tuple[int, DataStrategyConfig]]
    fitting: int


class FirstPass:
    """The rows of a space. limit: the most bytes that fit a device. considered: the legal candidates."""

    def __init__(self, legal: Legal, bounds: Bounds, limit: float):
        self._legal, self.bounds, self._limit = legal, bounds, limit
        self._recomputes = legal.space.recomputes()
        self.considered = 0
        self.rows = [row for group in legal.groups() for row in self._rows(group)]
        self.is_sifted = self.considered <= MOST_SIFTED

    def _rows(self, group: LegalGroup) -> Iterator[CandidateRow]:
        self.considered += len(group.datas) * len(group.micro_batches) * len(self._recomputes)
        plain = with_plain_schedule(group)
        for size in group.micro_batches:
            for recompute, least_s in zip(self._recomputes, self._least_s(group, plain, size)):
                yield CandidateRow(group, size, recompute, least_s)

    @cached_property
    def may_fit(self) -> int:
        """The candidates whose lower bound of memory fits."""
        return sum(self.memory(row).fitting for row in self.rows)

    def memory(self, row: CandidateRow) -> RowMemory:
        """Bound the memory of a row."""
        limit = NEVER if self.is_sifted else self._limit
        bounds = zip(self.bounds.num_bytes(row.group, row.micro_batch, row.recompute, limit), row.group.datas)
        datas = sorted(bounds, key=itemgetter(0))
        return RowMemory(datas, bisect_right(datas, self._limit, key=itemgetter(0)))

    def _least_s(self, group: LegalGroup, alike: LegalGroup, micro_batch: int) -> list[float]:
        """Lower bounds of a step by recomputation, with the blocks of `alike`."""
        forward, backward, again = self.bounds.seconds(alike, micro_batch, not group.schedule.overlaps_passes)
        microbatches, paths = self._legal.space.global_batch // group.dp // micro_batch, self.bounds.paths(group)

        def of(backward: float) -> float:
            return max(
                head * forward + work * microbatches * (forward + backward) + tail * backward
                for head, work, tail in paths
            )

        return [of(backward)] * (len(self._recomputes) - 1) + [of(backward + again)]  # the last repeats most
