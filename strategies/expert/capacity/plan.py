"""What the capacity dispatch will do: equal all-to-alls of all places that experts have. Torch-free."""

from __future__ import annotations

from parallelrun.plan.structure import Plan
from parallelrun.strategies.expert import memory, strategy, traffic


class Way(strategy.Way):
    """The ExpertWayPlan of kind `capacity` (Lepikhin et al. 2020)."""

    kind = "capacity"
    explained = (
        "Each expert has a fixed number of places per rank, so all messages have one size; empty places are sent too.",
        "Lepikhin et al. 2020 (GShard)",
    )

    def loads(self, plan: Plan) -> tuple[traffic.Rows, ...]:
        """The same everywhere, known to the byte."""
        return traffic.all_places(plan)

    def index_bytes(self, plan: Plan) -> int:
        """Of places."""
        return memory.placing_bytes(traffic.num_places(plan), plan)
