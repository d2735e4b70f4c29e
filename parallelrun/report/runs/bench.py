"""The table of `parallelrun bench`, from bench.json's document."""

from __future__ import annotations

from typing import Any

from parallelrun.base.wording import counted
from parallelrun.report.figures import degrees_text
from parallelrun.report.plans import predicted
from parallelrun.report.screen import open_console, table


def show(document: dict[str, Any]) -> None:
    """Print median and spread."""
    console = open_console()
    degrees = degrees_text(document["degrees"])
    title = f"bench: {document['model']} {document['preset']} {degrees} ({document['precision']})"
    drawn = table("step time", ">", "rate", ">", title=title, padding=(0, 2, 0, 0))
    ms = {name: document[f"{name}_s"] * 1e3 for name in ("median", "lower_quartile", "upper_quartile", "min", "p95")}
    drawn.add_row("median", f"{ms['median']:.1f} ms", "tokens/s", f"{document['tokens_per_s']:,.0f}")
    quartiles = f"{ms['lower_quartile']:.1f} - {ms['upper_quartile']:.1f} ms"
    drawn.add_row("quartiles", quartiles, "samples/s", f"{document['samples_per_s']:,.1f}")
    flops = f"{document['model_flops_per_s'] / 1e9:,.1f}"
    drawn.add_row("fastest", f"{ms['min']:.1f} ms", "model GFLOP/s", flops)
    payload = f"{document['payload_bytes_rank_0'] / 2**20:,.2f} MiB"
    drawn.add_row("95th percentile", f"{ms['p95']:.1f} ms", "payload of rank 0 per step", payload)
    console.print(drawn)
    console.print(f"{counted(document['steps'], 'step')} after {document['warmup']} of warm-up, {document['device']}")
    if document["predicted"]:
        console.print(f"predicted: {predicted.text(document['predicted'], document['median_s'])}", soft_wrap=True)
    if document["device"] == "cpu" and document["world"] > document["cores"]:
        crowd = f"{counted(document['world'], 'rank')} on {counted(document['cores'], 'core')}"
        console.print(f"step time is no scaling measurement: {crowd}")
