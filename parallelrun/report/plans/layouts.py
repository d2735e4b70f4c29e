"""The tensor layouts side by side on screen: of one plan, and over the points of a sweep. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console, Group
from rich.text import Text

from parallelrun.planner.contract.classes import tensor_strategy
from parallelrun.planner.predict.layout_costs import Comparison, InsideNode
from parallelrun.report.figures import bytes_text, digits
from parallelrun.report.screen import table

COLUMNS = (">received", ">of weights", ">weights", ">saved", ">steps", ">M/h")
LEGEND = (
    "received: bytes per rank, forward and backward; of weights: the part that is weights and their gradients\n"
    "weights: stored; saved: activations for backward; steps: consecutive messages\n"
    "M/h: tokens per hidden feature above which the layout receives less than 1d"
)


def panel(comparison: Comparison) -> Group:
    """Return the cost of one layer and one microbatch in every layout, and the reasons why others are not legal."""
    drawn = table("layout", *COLUMNS)
    for row in comparison.layouts:
        if row.figures:
            mark = "* " if row.chosen else "  "
            drawn.add_row(mark + row.layout, *_cells(asdict(row)), style="bold" if row.chosen else None)
    head = Text(
        f"{comparison.layer} and a microbatch of {comparison.rows:,} tokens (M/h "
        f"{digits(comparison.rows / comparison.hidden)}) on tp {comparison.tp}; * marks the plan's layout"
    )
    once = [
        Text(f"{row.layout}: also {bytes_text(row.figures.once_bytes)} once per step, to sum the gradients of weights")
        for row in comparison.layouts
        if row.figures and tensor_strategy(row.kind).copies_weights
    ]
    refused = [Text(f"{row.layout}: {row.reason}", "yellow") for row in comparison.layouts if row.reason]
    inside = [Text(inside_node_text(comparison.inside_node, comparison))] if comparison.inside_node else []
    return Group(head, drawn, *once, *refused, *inside, Text(LEGEND, "dim"))


def inside_node_text(found: InsideNode, comparison: Comparison) -> str:
    """Return whether a smaller tp with a larger dp would receive less with the same ranks and samples."""
    chosen = comparison.chosen
    if found.tp == comparison.tp and tensor_strategy(chosen.kind).is_one_dimensional:
        return f"1d at tp={found.tp} stays inside a node of {found.node}: no smaller tp is compared"
    other = (
        f"1d tp={found.tp} inside a node of {found.node} x dp={found.dp}" if found.tp > 1 else f"dp={found.dp} alone"
    )
    batch = "" if found.divides else " (with a batch that divides so)"
    theirs, ours = bytes_text(found.received_bytes), bytes_text(found.plan_received_bytes)
    verdict = f"{chosen.layout} receives less than 1d at this or any smaller tp"
    if found.wins:
        weights = (
            f"{bytes_text(found.weight_bytes)} per layer and rank instead of {bytes_text(found.plan_weight_bytes)}"
        )
        verdict = f"it receives less, if its weights fit: {weights}"
    return (
        f"with the same ranks and samples, {other}{batch} receives {theirs} per layer and step, sums of gradients "
        f"included, and this plan {ours}: {verdict}"
    )


def sweep_row(comparison: Comparison | None) -> dict[str, Any] | None:
    """Return the part of a point's comparison that `sweep_table` shows."""
    if comparison is None:
        return None
    return {"layer": comparison.layer, "rows": comparison.rows, "hidden": comparison.hidden, "tp": comparison.tp,
            "chosen": asdict(comparison.chosen)}  # fmt: skip


def sweep_table(points: Sequence[tuple[int, Mapping[str, Any]]], console: Console) -> None:
    """Print the points of a sweep side by side, each in its own layout. points: (number, `sweep_row`)."""
    if not points:
        return
    drawn = table(">#", "layout", ">tokens", *COLUMNS)
    for number, row in points:
        degree = f" {row['tp']}" if tensor_strategy(row["chosen"]["kind"]).is_one_dimensional else ""
        drawn.add_row(str(number), row["chosen"]["layout"] + degree, f"{row['rows']:,}", *_cells(row["chosen"]))
    console.print(
        Text("\nlayouts side by side: one layer and one microbatch", "bold"), drawn, Text(LEGEND, "dim"), sep="\n"
    )


def _cells(row: Mapping[str, Any]) -> list[str]:
    figures, break_even = row["figures"], row["break_even"]
    moved = figures["moved_weight_bytes"]
    above = "never" if break_even is None else digits(break_even) if break_even else "always"
    if tensor_strategy(row["kind"]).is_one_dimensional:
        above = "-"
    return [
        bytes_text(figures["received_bytes"]),
        bytes_text(moved) if moved else "none",
        bytes_text(figures["weight_bytes"]),
        bytes_text(figures["saved_bytes"]),
        f"{figures['steps']:,}",
        above,
    ]
