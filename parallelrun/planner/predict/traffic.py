"""Predicted traffic of a plan by axis, operation and purpose."""

from __future__ import annotations

from dataclasses import dataclass

from parallelrun.planner.contract.collective import Collective
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.predict.prediction import collectives, group_size, steps_between, wire_bytes
from parallelrun.planner.predict.rank_classes import rank_classes


@dataclass(frozen=True)
class TrafficRow:
    """Predicted traffic of one axis, operation and purpose: of the busiest rank, and in total over all ranks.

    every: the traffic occurs once in so many steps. most_bytes: the busiest rank's bound on payload_bytes, if these
    depend on the data.
    """

    axis: str
    operation: str
    purpose: str
    group_size: int
    calls: int
    payload_bytes: int
    wire_bytes: int
    total_calls: int
    total_payload_bytes: int
    total_wire_bytes: int
    every: int = 1
    most_bytes: int | None = None


def traffic_of(plan: Plan) -> tuple[int, tuple[TrafficRow, ...]]:
    """(the rank that sends most, a row per axis, operation and purpose)."""
    per_class = [(rank, num_ranks, collectives(plan, rank)) for rank, num_ranks in rank_classes(plan)]

    def sends(rows: list[Collective]) -> float:
        return sum(wire_bytes(row, group_size(plan, row.axis)) / steps_between(plan, row.purpose) for row in rows)

    busiest, _, busiest_rows = max(per_class, key=lambda item: sends(item[2]))
    own = {row.key: row for row in busiest_rows}
    alike: dict[tuple[str, str, str], list[tuple[int, Collective]]] = {}
    for _, num_ranks, rows in per_class:
        for row in rows:
            alike.setdefault(row.key, []).append((num_ranks, row))
    table = []
    for key, rows_of_key in sorted(alike.items()):
        row, size = own.get(key, Collective(*key, calls=0, payload_bytes=0)), group_size(plan, key[0])
        calls = sum(number * other.calls for number, other in rows_of_key)
        payload = sum(number * other.payload_bytes for number, other in rows_of_key)
        wire = sum(number * wire_bytes(other, size) for number, other in rows_of_key)
        sent = row.calls, row.payload_bytes, wire_bytes(row, size)
        table.append(TrafficRow(*key, size, *sent, calls, payload, wire, steps_between(plan, key[2]), row.most_bytes))
    return busiest, tuple(table)
