"""Draws docs/data_axis.svg, the comparison of a sweep, from docs/data_axis.csv (its comparison.csv).

python docs/data_axis.py
"""

from __future__ import annotations

from pathlib import Path

from parallelrun.report import comparison

HERE = Path(__file__).resolve().parent
PICTURE = HERE / "data_axis.svg"


def draw() -> str:
    """Return the picture as SVG."""
    return comparison.to_svg(comparison.from_csv((HERE / "data_axis.csv").read_text()))


if __name__ == "__main__":
    PICTURE.write_text(draw())
    print(f"written to {PICTURE}")
