"""Scaling over ranks in a sweep, compared with ideal scaling.

Points whose overrides differ only in world and degrees form a group. Strong scaling keeps the global batch; weak
scaling keeps the batch of each data replica (`local_batch`). Under ideal scaling, every rank processes as many
samples/s as a rank of the smallest point.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from parallelrun.base.records import write_text
from parallelrun.report import chart
from parallelrun.report.figures import digits
from parallelrun.report.records.metrics import metric_text
from parallelrun.report.sweeps.sweep_rows import DEGREES, FINISHED, is_crowded, read, varied

PICTURE = "scaling.svg"
RATE = "samples_per_s"
_SHAPING = {*DEGREES, "grid", "depth"}  # keys that may differ within a group


@dataclass(frozen=True)
class Scaled:
    """One point of a group. rate: samples/s; efficiency: the rate divided by that of ideal scaling."""

    point: int
    world: int
    rate: float
    efficiency: float


@dataclass(frozen=True)
class ScalingGroup:
    """Points that differ only in world and degrees, sorted by world.

    kind: strong | weak. crowded: several ranks shared a core.
    """

    label: str
    kind: str
    crowded: bool
    points: tuple[Scaled, ...]


def groups(rows: Sequence[dict[str, Any]]) -> list[ScalingGroup]:
    """Return the groups of a sweep's rows. Each has points of at least two world sizes."""
    alike: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    labels: dict[tuple[str, ...], str] = {}
    for row, names in zip(rows, varied(rows), strict=True):
        if row.get("state") in FINISHED and row.get(RATE) and row.get("world"):
            key = tuple(text for text in row.get("overrides", ()) if text.partition("=")[0] not in _SHAPING)
            others = [name for name in names if name.partition("=")[0] not in _SHAPING]
            labels[key] = " ".join(name.removeprefix("strategy=") for name in others) or str(row.get("strategy", ""))
            alike.setdefault(key, []).append(row)
    return [_group(labels[key], members) for key, members in alike.items() if len({m["world"] for m in members}) > 1]


def _group(label: str, rows: list[dict[str, Any]]) -> ScalingGroup:
    smallest = min(row["world"] for row in rows)
    base = max(row[RATE] / smallest for row in rows if row["world"] == smallest)
    kind = "strong" if len({row.get("global_batch") for row in rows}) == 1 else "weak"
    points = [Scaled(row["point"], row["world"], row[RATE], row[RATE] / row["world"] / base) for row in rows]
    crowded = any(map(is_crowded, rows))
    return ScalingGroup(label, kind, crowded, tuple(sorted(points, key=lambda point: (point.world, -point.rate))))


def efficiencies(rows: Sequence[dict[str, Any]]) -> dict[int, tuple[str, float]]:
    """Return (strong | weak, efficiency) of every point that belongs to a group, by the point's number."""
    return {point.point: (group.kind, point.efficiency) for group in groups(rows) for point in group.points}


def write(directory: Path) -> list[Path]:
    """Write scaling.svg in a sweep directory, if the sweep has groups and matplotlib is installed."""
    scaling_groups = groups(read(directory))
    if not scaling_groups or not chart.available():
        return []
    write_text(directory / PICTURE, to_svg(scaling_groups))
    return [directory / PICTURE]


def to_svg(scaling_groups: Sequence[ScalingGroup]) -> str:
    """Draw samples/s and efficiency over the number of ranks, with a line of ideal scaling for every group."""
    worlds = sorted({point.world for group in scaling_groups for point in group.points})
    drawn, (rates, shares) = chart.panels("scaling of the sweep's points", ["samples/s", "efficiency"])
    ideal = len(scaling_groups)  # its style: the last one of the legend
    for style, group in enumerate(scaling_groups):
        fastest = {one.world: one for one in reversed(group.points)}
        best = [fastest[world] for world in sorted(fastest)]
        first, last = best[0], best[-1]
        chart.line(rates, style, [(one.world, one.rate) for one in best])
        chart.line(rates, ideal, [(first.world, first.rate), (last.world, first.rate * last.world / first.world)])
        chart.line(shares, style, [(one.world, one.efficiency) for one in best])
    chart.line(shares, ideal, [(worlds[0], 1.0), (worlds[-1], 1.0)])
    for axes in (rates, shares):
        chart.scale(axes, "x", "{:g}".format, log=True, ticks=worlds, label="ranks, servers included")
    chart.scale(rates, "y", digits, log=True)
    chart.scale(shares, "y", partial(metric_text, "efficiency"), from_zero=True, label="of the ideal")
    notes = ["ideal: each rank adds as much as a rank of the smallest point; of several degrees the fastest is drawn"]
    if any(group.crowded for group in scaling_groups):
        notes.append("ranks shared cores: step time is no scaling measurement")
    return chart.svg(drawn, [*(f"{group.label}: {group.kind} scaling" for group in scaling_groups), "ideal"], notes)
