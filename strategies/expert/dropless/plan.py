"""What the dropless dispatch will do: uneven all-to-alls of the rows that are kept, after their counts. Torch-free."""

from __future__ import annotations

from parallelrun.plan.structure import Plan
from parallelrun.strategies.expert import memory, strategy, traffic

INT64_BYTES = 8


class Way(strategy.Way):
    """The ExpertWayPlan of kind `dropless` (Gale et al. 2022)."""

    kind = "dropless"
    explained = (
        "Counts go first, so that every rank receives exactly the rows that come.",
        "Gale et al. 2022 (MegaBlocks)",
    )

    def loads(self, plan: Plan) -> tuple[traffic.Rows, ...]:
        """An even load, and what no step can exceed."""
        return traffic.kept_rows(plan)

    def counts_bytes(self, plan: Plan) -> int:
        """A count for every expert and chunk."""
        return plan.spec.experts * plan.expert.chunks * INT64_BYTES

    def index_bytes(self, plan: Plan) -> int:
        """Rows are sorted by expert on arrival, and between two legs."""
        return sum(memory.sorting_bytes(rows.even) for rows in self.loads(plan)[1:])
