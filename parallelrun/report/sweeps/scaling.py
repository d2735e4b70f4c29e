"""Scaling over ranks in a sweep, compared with ideal scaling.

Points whose overrides differ only in world and degrees form a group. Strong scaling keeps the global batch; weak
scaling keeps the batch of each data replica (`local_batch`). Under ideal scaling, every rank processes as many
samples/s as a rank of the smallest point.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from parallelrun.report.sweeps.sweep_rows import DEGREES, FINISHED

RATE = "samples_per_s"
_SHAPING = {*DEGREES, "grid", "depth"}  # keys that may differ within a group


def efficiencies(rows: Sequence[dict[str, Any]]) -> dict[int, tuple[str, float]]:
    """Return (strong | weak, rate over that of ideal scaling) of the points of a sweep, by the point's number.

    A group has points of at least two world sizes.
    """
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if row.get("state") in FINISHED and row.get(RATE) and row.get("world"):
            key = tuple(text for text in row.get("overrides", ()) if text.partition("=")[0] not in _SHAPING)
            groups[key].append(row)
    shares: dict[int, tuple[str, float]] = {}
    for group in groups.values():
        smallest = min(row["world"] for row in group)
        if any(row["world"] > smallest for row in group):
            base = max(row[RATE] / smallest for row in group if row["world"] == smallest)
            kind = "strong" if len({row.get("global_batch") for row in group}) == 1 else "weak"
            shares |= {row["point"]: (kind, row[RATE] / row["world"] / base) for row in group}
    return shares
