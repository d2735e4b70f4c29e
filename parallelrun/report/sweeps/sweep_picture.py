"""The picture of a sweep: losses and top-1 accuracy of every point against time and against bytes sent.

It is drawn from the files of the run directories, so it can be drawn again at any time; `comparison.csv` has its
numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallelrun.base.records import write_text
from parallelrun.report import chart
from parallelrun.report.figures import byte_unit, csv_text, digits, thinned
from parallelrun.report.records.metrics import label_of
from parallelrun.report.sweeps.sweep_rows import is_crowded, read, read_json, read_jsonl, varied

PICTURE, NUMBERS = "comparison.svg", "comparison.csv"
MEASURES = ("loss", "val_loss", "val_top1")
CONTROL = "control"  # the purpose of traffic that carries no training data
MOST_LINES = 20
SPREAD = 30  # largest over smallest number; above it the axis is logarithmic
MOST_POINTS = 150  # of a line; more are averaged


@dataclass(frozen=True)
class Measured:
    """One row of metrics.jsonl. time_s: since training began, evaluation included. sent_bytes: by all ranks until then,
    with bandwidth-optimal algorithms."""

    step: int
    time_s: float
    sent_bytes: float
    measures: dict[str, float]


@dataclass(frozen=True)
class Series:
    """One point of the sweep. label: its overrides that differ from the others'."""

    point: int
    label: str
    crowded: bool  # its ranks shared cores
    measured: tuple[Measured, ...]
    bubble: float = 0.0  # predicted share of a step

    def with_measure(self, key: str) -> list[Measured]:
        return [at for at in self.measured if key in at.measures]


def series(directory: Path) -> list[Series]:
    """Return every finished point of a sweep directory."""
    rows = read(directory)
    points = []
    for row, names in zip(rows, varied(rows), strict=True):
        if row.get("state") != "done" or not row.get("directory"):
            continue
        measured = _measured(directory / row["directory"])
        if measured:
            label = " ".join(name.removeprefix("strategy=") for name in names) if len(rows) > 1 else ""
            label = label or str(row.get("strategy", f"point {row['point']}"))
            points.append(Series(row["point"], label, is_crowded(row), measured, row.get("bubble_predicted") or 0.0))
    return points


def _measured(run: Path) -> tuple[Measured, ...]:
    """Return the rows of metrics.jsonl with at least one measure that is a number."""
    sent_until = _sent_until(run)
    measures = [
        (row, {key: row[key] for key in MEASURES if isinstance(row.get(key), (int, float))})
        for row in read_jsonl(run / "metrics.jsonl")
    ]
    return tuple(Measured(row["step"], row["time_s"], sent_until(row), values) for row, values in measures if values)


def _sent_until(run: Path) -> Callable[[dict[str, Any]], float]:
    """Return a function from a row of metrics.jsonl to the bytes that all ranks have sent until then.

    It counts samples instead of updates, because an update of an asynchronous worker is only a part of the batch.
    """
    by_every: Counter[int] = Counter()  # bytes that are sent in every so many steps, and after the last one
    for row in read_json(run / "comm.json").get("rows") or []:
        if row["purpose"] != CONTROL:
            by_every[row.get("every", 1)] += row["wire_bytes"]
    summary = read_json(run / "summary.json")

    def times(every: int, steps: float) -> float:
        if every == 1:
            return steps
        return -(-steps // every) if steps == (summary.get("steps") or 0) else steps // every

    def until(row: dict[str, Any]) -> float:
        steps = row["samples"] / (summary.get("global_batch") or 1)
        return sum(size * times(every, steps) for every, size in by_every.items())

    return until


def write(directory: Path) -> list[Path]:
    """Write comparison.csv in a sweep directory with finished points, and comparison.svg if matplotlib is installed."""
    points = series(directory)
    if not points:
        return []
    write_text(directory / NUMBERS, to_csv(points))
    if not chart.available():
        return [directory / NUMBERS]
    write_text(directory / PICTURE, to_svg(points))
    return [directory / PICTURE, directory / NUMBERS]


def to_csv(points: list[Series]) -> str:
    """Return a row per point and measured step."""
    rows = [
        (line.point, line.label, int(line.crowded), at.step, round(at.time_s, 3), round(at.sent_bytes),
         *(at.measures.get(key, "") for key in MEASURES))
        for line in points
        for at in line.measured
    ]  # fmt: skip
    return csv_text([("point", "label", "crowded", "step", "time_s", "sent_bytes", *MEASURES), *rows])


def to_svg(series_of_sweep: list[Series]) -> str:
    """Draw loss, and accuracy where there is one, against time and against bytes; at most MOST_LINES points."""
    shown = series_of_sweep[:MOST_LINES]
    sent = [total for line in shown if (total := max(at.sent_bytes for at in line.measured)) > 0]
    unit, size = byte_unit(max(sent, default=0))
    measures = [key for key in MEASURES if any(line.with_measure(key) for line in shown)]
    names = [f"{label_of(key)} against {axis}" for key in measures for axis in ("time", "bytes sent")]
    drawn, panels = chart.panels("comparison of the sweep's points", names)
    for index, key in enumerate(measures):
        over_time, over_bytes = panels[2 * index : 2 * index + 2]
        for style, line in enumerate(shown):
            points = [(at, at.measures[key]) for at in line.with_measure(key)]
            chart.line(over_time, style, thinned([(at.time_s, value) for at, value in points], MOST_POINTS))
            chart.line(over_bytes, style, thinned([(at.sent_bytes / size, value) for at, value in points], MOST_POINTS))
        values = [value for line in shown for at in line.with_measure(key) if (value := at.measures[key]) > 0]
        for axes in (over_time, over_bytes):
            chart.scale(axes, "y", digits, log="loss" in key and _wide(values))
        chart.scale(over_time, "x", digits, from_zero=True, label="seconds of training")
        chart.scale(over_bytes, "x", digits, log=_wide(sent), from_zero=True, label=f"{unit} sent by all ranks")
    legend = [line.label + (f" ({line.bubble:.0%} bubble predicted)" if line.bubble else "") for line in shown]
    return chart.svg(drawn, legend, _notes(series_of_sweep, shown))


def _wide(values: list[float]) -> bool:
    """Return whether the numbers spread so far that even steps would show the largest only."""
    return bool(values) and max(values) / min(values) > SPREAD


def _notes(series_of_sweep: list[Series], shown: list[Series]) -> list[str]:
    notes = ["time: since training began, evaluation included; bytes: counted in one step, without control messages"]
    if any(line.crowded for line in shown):
        notes.append("step time is no scaling measurement: ranks shared cores")
    if len(series_of_sweep) > len(shown):
        notes.append(f"{len(series_of_sweep) - len(shown)} more points are in {NUMBERS}")
    return notes
