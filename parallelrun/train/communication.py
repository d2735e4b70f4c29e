"""The rows of comm.json: counted beside predicted traffic of the counted step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parallelrun.plan import prediction
from parallelrun.plan.structure import Collective
from parallelrun.train.build import Training


def communication_rows(measured: Mapping[int, list[dict[str, Any]]], training: Training) -> list[dict[str, Any]]:
    """Return the rows of comm.json: measured and predicted calls and bytes by rank, axis, operation and purpose."""
    plan = training.plan
    rows = []
    for rank, counted in sorted(measured.items()):
        predicted = {(c.axis, c.operation, c.purpose): c for c in prediction.collectives(plan, rank)}
        seen = {(c["axis"], c["operation"], c["purpose"]): c for c in counted}
        for key in sorted(predicted.keys() | seen.keys()):
            axis, operation, purpose = key
            expected = predicted.get(key)
            actual = Collective(**seen[key]) if key in seen else None
            rows.append(
                {
                    "rank": rank,
                    "axis": axis,
                    "operation": operation,
                    "purpose": purpose,
                    "calls": actual.calls if actual else 0,
                    "payload_bytes": actual.payload_bytes if actual else 0,
                    "wire_bytes": prediction.wire_bytes(actual, prediction.group_size(plan, axis)) if actual else 0,
                    "every": prediction.steps_between(plan, purpose),
                    "predicted_calls": expected.calls if expected else 0,
                    "predicted_payload_bytes": expected.payload_bytes if expected else 0,
                    "predicted_most_bytes": expected.most_bytes if expected else None,
                }
            )
    return rows
