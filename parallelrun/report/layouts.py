"""The tensor layouts side by side, on screen: in one plan, and over the points of a sweep. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from parallelrun.plan.comparison import Comparison, InsideNode
from parallelrun.plan.load import tensor_strategy
from parallelrun.report.figures import bytes_text, digits

COLUMNS = ("received", "of it weights", "weights", "kept", "steps", "M/h over")
LEGEND = (
    "received: bytes a rank gets, forward and backward, and what of them is weights and their gradients; weights: "
    "stored; kept: for backward; steps: messages one after the other; M/h over: tokens per hidden feature above which "
    "less is received than in 1d (always and never: at any)"
)


def panel(comparison: Comparison) -> Group:
    """What one layer and one microbatch cost in every layout; refused ones with their reasons; small tp beside."""
    table = _table("layout", *(f">{column}" for column in COLUMNS))
    for row in comparison.layouts:
        if row.figures:
            mark = "* " if row.chosen else "  "
            table.add_row(mark + row.layout, *_cells(asdict(row)), style="bold" if row.chosen else None)
    head = Text(
        f"{comparison.layer} and a microbatch of {comparison.rows:,} tokens (M/h "
        f"{digits(comparison.rows / comparison.hidden)}) on tp {comparison.tp}; * marks the plan's layout"
    )
    deep = [
        Text(f"{row.layout}: besides, {bytes_text(row.figures.once_bytes)} once a step: gradients summed over depth")
        for row in comparison.layouts
        if row.figures and tensor_strategy(row.kind).copies_weights
    ]
    refused = [Text(f"{row.layout}: {row.reason}", "yellow") for row in comparison.layouts if row.reason]
    inside = [Text(inside_node_text(comparison.inside_node, comparison))] if comparison.inside_node else []
    return Group(head, table, *deep, *refused, *inside, Text(LEGEND, "dim"))


def inside_node_text(found: InsideNode, comparison: Comparison) -> str:
    """What small tensor and large data parallelism would receive with the same ranks and samples; is it less?"""
    chosen = comparison.chosen
    if found.tp == comparison.tp and tensor_strategy(chosen.kind).is_one_dimensional:
        return f"1d at tp={found.tp} stays inside a node of {found.node}: no smaller tp is compared"
    other = (
        f"1d tp={found.tp} inside a node of {found.node} x dp={found.dp}" if found.tp > 1 else f"dp={found.dp} alone"
    )
    batch = "" if found.divides else " (given a batch that divides so)"
    theirs, ours = bytes_text(found.received_bytes), bytes_text(found.plan_received_bytes)
    fits = f" if its weights fit: {bytes_text(found.weight_bytes)} a layer and rank, here "
    verdict = (
        f"it wins on volume{fits}{bytes_text(found.plan_weight_bytes)}"
        if found.wins
        else f"{chosen.layout} wins, and so it does against any smaller tp"
    )
    return (
        f"the same ranks and samples as {other}{batch} receive {theirs} per layer and step, sums of gradients "
        f"included; here {ours}: {verdict}"
    )


def sweep_row(comparison: Comparison | None) -> dict[str, Any] | None:
    """What a sweep keeps of a point for `sweep_table`."""
    if comparison is None:
        return None
    return {"layer": comparison.layer, "rows": comparison.rows, "hidden": comparison.hidden, "tp": comparison.tp,
            "chosen": asdict(comparison.chosen)}  # fmt: skip


def sweep_table(points: Sequence[tuple[int, Mapping[str, Any]]], console: Console) -> None:
    """The points of a sweep side by side, each in its own layout. points: (number, `sweep_row`)."""
    if not points:
        return
    table = _table(">#", "layout", ">tokens", *(f">{column}" for column in COLUMNS))
    for number, row in points:
        degree = f" {row['tp']}" if tensor_strategy(row["chosen"]["kind"]).is_one_dimensional else ""
        table.add_row(str(number), row["chosen"]["layout"] + degree, f"{row['rows']:,}", *_cells(row["chosen"]))
    console.print(Text("\nlayouts side by side: one layer and one microbatch", "bold"))
    console.print(table)
    console.print(Text(LEGEND, "dim"))


def _cells(row: Mapping[str, Any]) -> list[str]:
    figures = row["figures"]
    return [
        bytes_text(figures["received_bytes"]),
        bytes_text(figures["moved_weight_bytes"]) if figures["moved_weight_bytes"] else "none",
        bytes_text(figures["weight_bytes"]),
        bytes_text(figures["saved_bytes"]),
        f"{figures['steps']:,}",
        _break_even_text(row),
    ]


def _break_even_text(row: Mapping[str, Any]) -> str:
    if tensor_strategy(row["kind"]).is_one_dimensional:
        return "-"
    if row["break_even"] is None:
        return "never"
    return digits(row["break_even"]) if row["break_even"] else "always"


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for column in columns:
        number = column.startswith(">")
        table.add_column(column.lstrip(">"), justify="right" if number else "left", no_wrap=not number, overflow="fold")
    return table
