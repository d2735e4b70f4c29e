"""Prediction of the dropless dispatcher: uneven all-to-alls of the kept rows, after their counts."""

from __future__ import annotations

from dataclasses import dataclass

from parallelrun.planner.contract.plan import Plan

from ..common import plan as common

INT64_BYTES = 8


@dataclass(frozen=True)
class DroplessDispatcher(common.AllToAllDispatcher):
    """MegaBlocks' dispatch (Gale et al. 2022): the bytes of an even load, and a bound that no step can exceed."""

    kind = "dropless"
    explained = (
        "Counts go first, so that every rank receives exactly the rows that come.",
        "Gale et al. 2022 (MegaBlocks)",
    )

    def rows(self, plan: Plan) -> tuple[common.Rows, ...]:
        return common.kept_rows(plan)

    def counts_bytes(self, plan: Plan) -> int:
        """One count for every expert and chunk."""
        return plan.spec.experts * self.chunks * INT64_BYTES

    def index_bytes(self, plan: Plan) -> int:
        """Rows are sorted by expert on arrival and between two levels: the source and the destination of each."""
        return sum(2 * rows.busiest(plan) * common.INDEX_BYTES for rows in self.rows(plan)[1:])
