"""A sweep's one picture: validation loss and top-1 accuracy of every point against time and against bytes sent.

From the run directories' files alone, so that it can be drawn again at any time; `comparison.csv` has its numbers. No
torch.
"""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallelrun.records import write_text
from parallelrun.report import chart
from parallelrun.report.figures import byte_unit, digits
from parallelrun.report.sweep import read, read_json, varied

PICTURE, NUMBERS = "comparison.svg", "comparison.csv"
MEASURES = {"val_loss": "validation loss", "val_top1": "top-1 accuracy"}
CONTROL = "control"  # the purpose of what carries no training
MOST_LINES = 20
SPREAD = 30  # above it bytes are drawn in factors


@dataclass(frozen=True)
class Evaluation:
    """One evaluated step. time_s: since training began, evaluation included. sent_bytes: by all ranks until then, what
    they must send under bandwidth-optimal algorithms."""

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
    evaluations: tuple[Evaluation, ...]


def series(directory: Path) -> list[Series]:
    """Every finished point that was evaluated, from a sweep directory's files."""
    rows = read(directory)
    found = []
    for row, names in zip(rows, varied(rows), strict=True):
        if row.get("state") != "done" or not row.get("directory"):
            continue
        evaluations = _evaluations(directory / row["directory"])
        if evaluations:
            label = _label(names) if len(rows) > 1 else ""
            label = label or str(row.get("strategy", f"point {row['point']}"))
            found.append(Series(row["point"], label, (row.get("ranks_per_core") or 0) > 1, tuple(evaluations)))
    return found


def _label(names: list[str]) -> str:
    """`ring` for `strategy=ring`, other keys with their names."""
    return " ".join(name.removeprefix("strategy=") for name in names)


def _evaluations(run: Path) -> list[Evaluation]:
    """The evaluated rows of metrics.jsonl. A torn line is left out; so is a measure that was no number."""
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
            found.append(Evaluation(row["step"], row["time_s"], sent.until(row), measures))
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
    """comparison.svg and comparison.csv in a sweep directory; nothing where no point was evaluated."""
    found = series(directory)
    if not found:
        return []
    write_text(directory / PICTURE, to_svg(found))
    write_text(directory / NUMBERS, to_csv(found))
    return [directory / PICTURE, directory / NUMBERS]


def to_csv(found: list[Series]) -> str:
    """A row per point and evaluation."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("point", "label", "step", "time_s", "sent_bytes", *MEASURES))
    for one in found:
        for at in one.evaluations:
            values = (at.measures.get(key, "") for key in MEASURES)
            writer.writerow((one.point, one.label, at.step, at.time_s, round(at.sent_bytes), *values))
    return text.getvalue()


def to_svg(found: list[Series]) -> str:
    """Loss, and accuracy where there is one, against time and against bytes; at most 20 points, the first ones."""
    shown = found[:MOST_LINES]
    sent = [at.sent_bytes for one in shown for at in one.evaluations if at.sent_bytes > 0]
    unit, size = byte_unit(max(sent, default=0))
    factors = bool(sent) and max(sent) / min(sent) > SPREAD
    time = chart.Axis("seconds of training", digits, from_zero=True)
    volume = chart.Axis(f"{unit} sent by all ranks", digits, log=factors, from_zero=True)
    panels = []
    for key, name in MEASURES.items():
        if not any(key in at.measures for one in shown for at in one.evaluations):
            continue
        value = chart.Axis("", "{:.3g}".format)
        panels.append(chart.Panel(f"{name} against time", time, value, _lines(shown, key, lambda at: at.time_s)))
        panels.append(
            chart.Panel(
                f"{name} against bytes sent", volume, value, _lines(shown, key, lambda at: at.sent_bytes / size)
            )
        )
    return chart.draw("comparison of the sweep's points", panels, [one.label for one in shown], _notes(found, shown))


def _lines(shown: list[Series], measure: str, along: Callable[[Evaluation], float]) -> tuple[chart.Line, ...]:
    return tuple(
        chart.Line(style, tuple((along(at), at.measures[measure]) for at in one.evaluations if measure in at.measures))
        for style, one in enumerate(shown)
    )


def _notes(found: list[Series], shown: list[Series]) -> list[str]:
    notes = [
        "time: since training began, evaluation included; bytes: what ranks must send, counted in a step; no control"
    ]
    if any(one.crowded for one in shown):
        notes.append("ranks shared cores: time is no scaling measurement")
    if len(found) > len(shown):
        notes.append(f"{len(found) - len(shown)} more points are in {NUMBERS}")
    return notes
