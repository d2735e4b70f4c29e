"""The table of `parallelrun calibrate`."""

from __future__ import annotations

from typing import Any

from parallelrun.report.screen import open_console, table


def show(document: dict[str, Any]) -> None:
    """Print the constants, and each training beside its prediction."""
    console = open_console()
    constants = table("constant", ">", "value", title=f"cluster={document['cluster']}", padding=(0, 2, 0, 0))
    for key, value in document["constants"].items():
        constants.add_row(key, f"{value:g}")
    console.print(constants)
    clock = "CPU time" if document["clock"] == "cpu" else "time"
    steps = table("training", ">", f"{clock} of a step", ">", "predicted", ">", "spread", padding=(0, 2, 0, 0))
    for row in document["steps"]:
        measured = row["measured_s"] * 1e3
        predicted = measured * row["predicted_over_measured"]
        steps.add_row(row["name"], f"{measured:.1f} ms", f"{predicted:.1f} ms", f"{row['spread']:.0%}")
    console.print(steps)
    for row in document["added"]:
        before, after = (abs(row[key] - 1) for key in ("before", "after"))
        console.print(f"added {row['source']}: error {before:.1%} before, {after:.1%} after")
    for line in document["provenance"]:
        console.print(line)
    console.print(f"written: {document['path']}")
    console.print(f"parallelrun plan ... cluster={document['cluster']}")
