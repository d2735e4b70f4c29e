"""A sweep's one picture: losses and top-1 accuracy of every point against time and against bytes sent.

From the run directories' files alone, so that it can be drawn again at any time; `comparison.csv` has its numbers. No
torch.
"""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from parallelrun.records import write_text
from parallelrun.report import chart
from parallelrun.report.figures import byte_unit, digits
from parallelrun.report.sweep import read, read_json, varied

PICTURE, NUMBERS = "comparison.svg", "comparison.csv"
MEASURES = {"loss": "training loss", "val_loss": "validation loss", "val_top1": "top-1 accuracy"}
CONTROL = "control"  # the purpose of what carries no training
MOST_LINES = 20
SPREAD = 30  # above it bytes and losses are drawn in factors
MOST_POINTS = 150  # of a line; more are averaged


@dataclass(frozen=True)
class Measured:
    """One row of metrics.jsonl. time_s: since training began, evaluation included. sent_bytes: by all ranks until then,
    what they must send under bandwidth-optimal algorithms."""

    step: int
    time_s: float
    sent_bytes: float
    measures: dict[str, float]


@dataclass(frozen=True)
class Series:
    """One point of the sweep. label: how it differs from the others."""

    point: int
    label: str
    crowded: bool  # its ranks shared cores
    measured: tuple[Measured, ...]

    def with_measure(self, key: str) -> list[Measured]:
        return [at for at in self.measured if key in at.measures]


def series(directory: Path) -> list[Series]:
    """Every finished point from a sweep directory's files."""
    rows = read(directory)
    found = []
    for row, names in zip(rows, varied(rows), strict=True):
        if row.get("state") != "done" or not row.get("directory"):
            continue
        measured = _measured(directory / row["directory"])
        if measured:
            label = _label(_read(names, row)) if len(rows) > 1 else ""
            label = label or str(row.get("strategy", f"point {row['point']}"))
            found.append(Series(row["point"], label, (row.get("ranks_per_core") or 0) > 1, tuple(measured)))
    return found


def _read(names: list[str], row: dict[str, Any]) -> list[str]:
    """Without the overrides of which the point notes that its strategy does not read them."""
    notes = row.get("notes", ())
    return [name for name in names if not any(note.startswith(f"{name} is read by none") for note in notes)]


def _label(names: list[str]) -> str:
    """`ring` for `strategy=ring`, other keys with their names."""
    return " ".join(name.removeprefix("strategy=") for name in names)


def _measured(run: Path) -> list[Measured]:
    """The rows of metrics.jsonl that measure something. A torn line is left out; so is a measure that was no number."""
    try:
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    sent = _Sent.of(run)
    found = []
    for line in lines:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        measures = {key: row[key] for key in MEASURES if isinstance(row.get(key), (int, float))}
        if measures:
            found.append(Measured(row["step"], row["time_s"], sent.until(row), measures))
    return found


@dataclass(frozen=True)
class _Sent:
    """What all ranks send in a step of the whole batch. by_every: bytes of what is sent in every so many steps, and
    after the last one."""

    by_every: dict[int, int]
    global_batch: int
    steps: int

    @classmethod
    def of(cls, run: Path) -> _Sent:
        by_every: Counter[int] = Counter()
        for row in read_json(run / "comm.json").get("rows") or []:
            if row["purpose"] != CONTROL:
                by_every[row.get("every", 1)] += row["wire_bytes"]
        summary = read_json(run / "summary.json")
        return cls(dict(by_every), summary.get("global_batch") or 1, summary.get("steps") or 0)

    def until(self, row: dict[str, Any]) -> float:
        """An update of an asynchronous worker is a part of the batch, so samples are counted, not updates."""
        steps = row["samples"] / self.global_batch
        return sum(size * self._times(every, steps) for every, size in self.by_every.items())

    def _times(self, every: int, steps: float) -> float:
        if every == 1:
            return steps
        return -(-steps // every) if steps == self.steps else steps // every


def write(directory: Path) -> list[Path]:
    """Write comparison.csv in a sweep directory with finished points, and comparison.svg if matplotlib is installed."""
    found = series(directory)
    if not found:
        return []
    write_text(directory / NUMBERS, to_csv(found))
    if not chart.available():
        return [directory / NUMBERS]
    write_text(directory / PICTURE, to_svg(found))
    return [directory / PICTURE, directory / NUMBERS]


def to_csv(found: list[Series]) -> str:
    """A row per point and measured step."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("point", "label", "crowded", "step", "time_s", "sent_bytes", *MEASURES))
    for one in found:
        for at in one.measured:
            values = (at.measures.get(key, "") for key in MEASURES)
            place = (one.point, one.label, int(one.crowded), at.step)
            writer.writerow((*place, round(at.time_s, 3), round(at.sent_bytes), *values))
    return text.getvalue()


def from_csv(text: str) -> list[Series]:
    """What `to_csv` wrote, so that a picture can be drawn again from its numbers."""
    found: dict[tuple[int, str, bool], list[Measured]] = {}
    for row in csv.DictReader(io.StringIO(text)):
        measures = {key: float(row[key]) for key in MEASURES if row[key]}
        at = Measured(int(row["step"]), float(row["time_s"]), float(row["sent_bytes"]), measures)
        found.setdefault((int(row["point"]), row["label"], row["crowded"] == "1"), []).append(at)
    return [Series(*key, tuple(steps)) for key, steps in found.items()]


def to_svg(found: list[Series]) -> str:
    """Draw loss, and accuracy where there is one, against time and against bytes; at most MOST_LINES points."""
    shown = found[:MOST_LINES]
    sent = [total for one in shown if (total := max(at.sent_bytes for at in one.measured)) > 0]
    unit, size = byte_unit(max(sent, default=0))
    measures = {key: name for key, name in MEASURES.items() if any(one.with_measure(key) for one in shown)}
    names = [f"{name} against {what}" for name in measures.values() for what in ("time", "bytes sent")]
    drawn, panels = chart.panels("comparison of the sweep's points", names)
    for index, key in enumerate(measures):
        over_time, over_bytes = panels[2 * index : 2 * index + 2]
        for style, one in enumerate(shown):
            points = [(at, at.measures[key]) for at in one.with_measure(key)]
            chart.line(over_time, style, _thinned([(at.time_s, value) for at, value in points]))
            chart.line(over_bytes, style, _thinned([(at.sent_bytes / size, value) for at, value in points]))
        values = [value for one in shown for at in one.with_measure(key) if (value := at.measures[key]) > 0]
        for axes in (over_time, over_bytes):
            chart.scale(axes, "y", "{:.3g}".format, log="loss" in key and _wide(values))
        chart.scale(over_time, "x", digits, from_zero=True, label="seconds of training")
        chart.scale(over_bytes, "x", digits, log=_wide(sent), from_zero=True, label=f"{unit} sent by all ranks")
    return chart.svg(drawn, [one.label for one in shown], _notes(found, shown))


def _wide(values: list[float]) -> bool:
    """Return whether the numbers spread so far that even steps would show the largest only."""
    return bool(values) and max(values) / min(values) > SPREAD


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most MOST_POINTS: means of as many neighbours each."""
    size = -(-len(points) // MOST_POINTS) or 1
    parts = [points[start : start + size] for start in range(0, len(points), size)]
    return [(fmean(x for x, _ in part), fmean(y for _, y in part)) for part in parts]


def _notes(found: list[Series], shown: list[Series]) -> list[str]:
    notes = [
        "time: since training began, evaluation included; bytes: what ranks must send, counted in a step; no control"
    ]
    if any(one.crowded for one in shown):
        notes.append("ranks shared cores: time is no scaling measurement")
    if len(found) > len(shown):
        notes.append(f"{len(found) - len(shown)} more points are in {NUMBERS}")
    return notes
