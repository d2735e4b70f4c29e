"""A look at all candidates of a space, by lower bounds of blocks alone."""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

from parallelrun.config.schema.run_schema import DataStrategyConfig
from parallelrun.planner.search.bounds import Bounds
from parallelrun.planner.search.legal import Legal, LegalGroup


class CandidateRow(NamedTuple):
    """Candidates that differ in the data strategy alone. datas: with the bytes that the fullest pp rank holds at least,
    the least first. fitting: how many of them may fit. least_s: a lower bound of a step. kept: bytes for backward, or
    fewer; 0 where none can fit."""

    group: LegalGroup
    micro_batch: int
    recompute: str
    datas: tuple[tuple[int, DataStrategyConfig], ...]
    fitting: int
    kept: int
    least_s: float = 0.0

    @property
    def shape(self) -> tuple[int, int, int, int, int, str]:
        """The degrees and the kind of tensor layout, by which plans are distinguished where few are shown."""
        group = self.group
        return group.pp, group.dp, group.cp, group.tp, group.ep, group.tensor.kind


class FirstPass:
    """The rows of a space. limit: the most bytes that fit a device. considered, may_fit: legal candidates, and those
    whose lower bound of memory fits."""

    def __init__(self, legal: Legal, bounds: Bounds, limit: float):
        self._legal, self.bounds, self._limit = legal, bounds, limit
        self._recomputes = legal.space.recomputes()
        self.considered = self.may_fit = 0
        self.rows: list[CandidateRow] = []
        for group in legal.groups():
            self._add(group)

    def _add(self, group: LegalGroup) -> None:
        bounds = self.bounds
        self.considered += len(group.datas) * len(group.micro_batches) * len(self._recomputes)
        samples = self._legal.space.global_batch // group.dp
        by_rounds: dict[bool, tuple[tuple[int, DataStrategyConfig], ...]] = {}
        for size in group.micro_batches:
            several = samples > size
            if several not in by_rounds:
                every = ((bounds.held_bytes(group, data, several), data) for data in group.datas)
                by_rounds[several] = tuple(sorted(every, key=lambda item: item[0]))
            held = by_rounds[several]
            sizes = [data for data, _ in held]
            flight, seconds = bounds.in_flight(group, size), None
            for recompute in self._recomputes:
                saved, fitting, least = 0, 0, 0.0
                if sizes[0] <= self._limit:
                    each, beside = bounds.kept_bytes(group, size, recompute)
                    saved = flight * each + (max(0, beside) if flight else 0)
                    fitting = bisect_right(sizes, self._limit - saved)
                if fitting:
                    seconds = seconds or self._least_s(group, size)
                    least = seconds[recompute == self._recomputes[-1]]
                self.rows.append(CandidateRow(group, size, recompute, held, fitting, saved, least))
                self.may_fit += fitting

    def _least_s(self, group: LegalGroup, micro_batch: int) -> tuple[float, float]:
        """Lower bounds of a step: with the blocks that repeat least, and with those that repeat most."""
        forward, backward, again = self.bounds.seconds(group, micro_batch)
        microbatches, paths = self._legal.space.global_batch // group.dp // micro_batch, self.bounds.paths(group)

        def of(backward: float) -> float:
            return max(
                head * forward + work * microbatches * (forward + backward) + tail * backward
                for head, work, tail in paths
            )

        return of(backward), of(backward + again)
