"""The table of `parallelrun bench`, from bench.json's document."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from parallelrun.report.figures import degrees_text
from parallelrun.report.screen import open_console
from parallelrun.wording import counted


def show(document: dict[str, Any], enabled: bool = True) -> None:
    """Print median and spread; nothing on ranks that do not own the console."""
    if not enabled:
        return
    console = open_console()
    degrees = degrees_text(document["degrees"])
    table = Table(title=f"bench: {document['model']} {document['preset']} {degrees} ({document['precision']})")
    for heading in ("step time", "", "rate", ""):
        table.add_column(heading, justify="left" if heading else "right")
    left = [
        ("median", document["median_s"]),
        ("quartiles", (document["lower_quartile_s"], document["upper_quartile_s"])),
        ("fastest", document["min_s"]),
        ("95th percentile", document["p95_s"]),
    ]
    right = [
        ("tokens/s", f"{document['tokens_per_s']:,.0f}"),
        ("samples/s", f"{document['samples_per_s']:,.1f}"),
        ("model GFLOP/s", f"{document['model_flops_per_s'] / 1e9:,.1f}"),
        ("payload of rank 0 a step", f"{document['payload_bytes_rank_0'] / 2**20:,.2f} MiB"),
    ]
    for (name, value), (rate, figure) in zip(left, right):
        table.add_row(name, _milliseconds(value), rate, figure)
    console.print(table)
    console.print(f"{counted(document['steps'], 'step')} after {document['warmup']} of warm-up, {document['device']}")
    if document["device"] == "cpu" and document["world"] > document["cores"]:
        crowd = f"{counted(document['world'], 'rank')} on {counted(document['cores'], 'core')}"
        console.print(f"step time is no scaling measurement: {crowd}")


def _milliseconds(value: float | tuple[float, float]) -> str:
    if isinstance(value, tuple):
        return f"{value[0] * 1e3:.1f} - {value[1] * 1e3:.1f} ms"
    return f"{value * 1e3:.1f} ms"
