"""The predicted time of a step beside the measured one, from summary.json and bench.json."""

from __future__ import annotations

from typing import Any

from parallelrun.report.figures import seconds_text

PARTS = {
    "compute_s": "computing", "comm_exposed_s": "waiting to communicate", "bubble_s": "bubble",
}  # fmt: skip


def text(predicted: dict[str, Any], measured_s: float | None) -> str:
    """Return the predicted step, its parts where they compare, and how far it is off."""
    low, high = (seconds_text(predicted[name]) for name in ("p10_s", "p90_s"))
    sentence = f"{seconds_text(predicted['step_s'])} a step ({low} to {high})"
    if measured_s:
        off = measured_s / predicted["step_s"] - 1
        sentence += f": measured is {abs(off):.0%} {'longer' if off > 0 else 'shorter'}"
    if predicted["compares_parts"]:
        parts = [f"{name} {seconds_text(predicted[key])}" for key, name in PARTS.items() if predicted[key]]
        sentence += f"\n{', '.join(parts)}"
    return sentence
