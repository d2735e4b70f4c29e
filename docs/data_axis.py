"""Draws docs/data_axis.svg, the comparison of a sweep, from docs/data_axis.csv, the sweep's comparison.csv.

python docs/data_axis.py
"""

from __future__ import annotations

import csv
import io
from pathlib import Path

from parallelrun.report.sweeps import sweep_picture
from parallelrun.report.sweeps.sweep_picture import MEASURES, Measured, Series

HERE = Path(__file__).resolve().parent
PICTURE = HERE / "data_axis.svg"


def draw() -> str:
    """Return the picture as SVG."""
    return sweep_picture.to_svg(from_csv((HERE / "data_axis.csv").read_text()))


def from_csv(text: str) -> list[Series]:
    """Return the points of a comparison.csv."""
    found: dict[tuple[int, str, bool], list[Measured]] = {}
    for row in csv.DictReader(io.StringIO(text)):
        measures = {key: float(row[key]) for key in MEASURES if row[key]}
        at = Measured(int(row["step"]), float(row["time_s"]), float(row["sent_bytes"]), measures)
        found.setdefault((int(row["point"]), row["label"], row["crowded"] == "1"), []).append(at)
    return [Series(*key, tuple(steps)) for key, steps in found.items()]


if __name__ == "__main__":
    PICTURE.write_text(draw())
    print(f"written to {PICTURE}")
