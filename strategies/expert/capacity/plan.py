"""Prediction of the capacity dispatcher: equal all-to-alls of all capacity slots."""

from __future__ import annotations

from dataclasses import dataclass

from parallelrun.base.precision import BYTES
from parallelrun.models.moe.memory import num_assignments, num_kept, num_slots
from parallelrun.planner.contract.plan import Plan

from ..common import plan as common


@dataclass(frozen=True)
class CapacityDispatcher(common.AllToAllDispatcher):
    """GShard's dispatch (Lepikhin et al. 2020): all slots are sent, filled or empty."""

    kind = "capacity"
    needs_capacity = True
    explained = (
        "Each expert has a fixed number of slots per rank, so all messages have one size; empty slots are sent too.",
        "Lepikhin et al. 2020 (GShard)",
    )

    def rows(self, plan: Plan) -> tuple[common.Rows, ...]:
        return (common.Rows(num_slots(plan)),) * (len(common.levels(plan)) + 1)

    def index_bytes(self, plan: Plan) -> int:
        """Per slot the token, the assignment and the weight, as a local row has; per assignment whether it was kept."""
        empty = num_slots(plan) - num_kept(plan)
        slot_bytes = 2 * common.INDEX_BYTES + BYTES[plan.precision.compute]
        return empty * slot_bytes + num_assignments(plan) * common.FLAG_BYTES
