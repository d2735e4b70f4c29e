"""The final panel of a run: how the loss went, how fast, what was sent, and where everything lies. Reads the files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from parallelrun.plan.prediction import matches_prediction as matches_prediction
from parallelrun.report import routing
from parallelrun.report.figures import bytes_text, degrees_text, seconds_text
from parallelrun.report.screen import WIDEST, open_console
from parallelrun.wording import counted

BARS = "▁▂▃▄▅▆▇█"
LABEL, FRAME = 9, 4  # columns of the labels, and of the panel's frame
FILES = (
    "config.yaml", "plan.json", "metrics.jsonl", "routing.jsonl", "routing.svg", "comm.json", "summary.json",
    "servers.json", "logs",
)  # fmt: skip
_SUMMED = ("calls", "predicted_calls", "payload_bytes", "predicted_payload_bytes", "wire_bytes")  # of comm.json's rows


def sparkline(values: list[float], width: int = 60) -> str:
    """The values as bars, lowest to highest, averaged into at most `width` columns. Non-finite values are gaps."""
    if not values:
        return ""
    width = min(width, len(values))
    cells = []
    for column in range(width):
        part = values[column * len(values) // width : (column + 1) * len(values) // width]
        good = [value for value in part if value is not None and value == value and abs(value) != float("inf")]
        cells.append(sum(good) / len(good) if good else None)
    shown = [cell for cell in cells if cell is not None]
    low, span = min(shown, default=0.0), (max(shown, default=0.0) - min(shown, default=0.0)) or 1.0
    return "".join(" " if cell is None else BARS[int((cell - low) / span * (len(BARS) - 1))] for cell in cells)


def show(directory: Path, console: Console | None = None) -> None:
    """Draw a finished run from its metrics.jsonl, summary.json and comm.json; without a terminal as lines."""
    console = console or open_console()
    summary = json.loads((directory / "summary.json").read_text())
    metrics = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    communication = json.loads((directory / "comm.json").read_text())["rows"]
    width = min(console.width, WIDEST)
    rows = [*_losses(metrics, summary, width - FRAME), ("", Text("")), *_speed(summary)]
    parts: list[Any] = [_labelled(rows)]
    experts = routing.panel(directory, summary, console)
    if experts:
        parts += [Text(""), experts]
    if communication:
        parts += [Text(""), communication_table(communication)]
    parts += [Text(""), _labelled(_files(directory))]
    degrees = degrees_text({axis: summary.get(axis, 1) for axis in ("dp", "tp", "pp", "ep")})
    title = f"{summary['model']} · {summary['strategy']} · {degrees} · {summary['state']}"
    if console.is_terminal:
        console.print(Panel(Group(*parts), title=title, expand=False))
    else:
        console.print(Text(title, "bold"), *parts, sep="\n")


def _labelled(rows: list[tuple[str, Text]]) -> Table:
    """Texts beside their labels; a text that needs several lines stays in its column."""
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(style="bold", no_wrap=True, min_width=LABEL)
    table.add_column(overflow="fold")
    for label, text in rows:
        table.add_row(label, text)
    return table


def _losses(metrics: list[dict[str, Any]], summary: dict[str, Any], width: int) -> list[tuple[str, Text]]:
    rows = []
    for name, form, style in (("loss", ".4f", "green"), ("val_loss", ".4f", "cyan"), ("val_top1", ".1%", "cyan")):
        values = [row[name] for row in metrics if name in row]
        if values:
            first, last = f"{values[0]:{form}} ", f" {values[-1]:{form}}" if len(values) > 1 else ""
            bars = sparkline(values, min(60, width - LABEL - 1 - len(first) - len(last))) if len(values) > 1 else ""
            rows.append((name, Text.assemble(first, (bars, style), last)))
    steps, samples = counted(summary["steps"], "step"), counted(summary["global_batch"], "sample")
    return [*rows, ("", Text(f"{steps} of {samples}, {summary['parameters']:,} parameters"))]


def _speed(summary: dict[str, Any]) -> list[tuple[str, Text]]:
    speed = Text(f"{summary['step_time_median_s'] * 1e3:.0f} ms a step (median), {_rate(summary)}")
    speed.append(_parts_of_a_step(summary))
    rows = [("speed", speed)]
    if summary.get("bubble_measured") is not None and summary["pp"] > 1:
        measured = f"{summary['bubble_measured']:.0%} of a step measured ({seconds_text(summary['bubble_s'])})"
        rows.append(("bubble", Text(f"{measured}, {summary['bubble_predicted']:.0%} predicted")))
    if summary.get("staleness_mean") is not None:
        rows.append(("staleness", Text(_staleness(summary))))
    rows.append(("memory", Text(f"{bytes_text(summary['peak_memory_bytes'])} at the peak of the largest rank")))
    crowd = summary["ranks_per_core"]
    if crowd and crowd > 1:
        world, cores = summary["world"], counted(round(summary["world"] / crowd), "core")
        rows.append(("", Text(f"step time is no scaling measurement: {world} ranks on {cores}", "yellow")))
    return rows


def _staleness(summary: dict[str, Any]) -> str:
    """How many updates others made between a worker's read and its own, and how far workers were apart."""
    most, gap = counted(summary["staleness_max"], "update"), counted(summary["clock_gap_max"], "step")
    text = f"{summary['staleness_mean']:.2f} updates on average, at most {most}; workers at most {gap} apart"
    bound = summary.get("staleness_bound")
    dropped = f"; {counted(summary['dropped_gradients'], 'gradient')} dropped" if summary["dropped_gradients"] else ""
    return text + (f" (bound {bound})" if bound is not None else "") + dropped


def _rate(summary: dict[str, Any]) -> str:
    """Tokens a second; samples where each has one target."""
    tokens, samples = summary["tokens_per_s"], summary.get("samples_per_s")
    return f"{samples:,.0f} samples/s" if samples == tokens else f"{tokens:,.0f} tokens/s"


def _parts_of_a_step(summary: dict[str, Any]) -> str:
    """Where the time of a step goes, mean over ranks: nothing where waits were not timed, nor for one rank."""
    names = {"compute_s": "computing", "comm_exposed_s": "waiting to communicate", "data_s": "data"}
    if summary.get("bubble_measured") is None or summary["world"] == 1:
        return ""
    return "\n" + ", ".join(f"{name} {seconds_text(summary[key])}" for key, name in names.items())


def communication_table(rows: list[dict[str, Any]]) -> Group:
    """One row per axis, operation and purpose, summed over ranks: measured beside predicted, for one step.

    Receives are left out: their bytes are counted at the sender.
    """
    rows = [row for row in rows if row["operation"] != "recv"]
    merged: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        merged.setdefault((row["axis"], row["operation"], row["purpose"]), []).append(row)
    exact = all(matches_prediction(row) for row in rows)
    bounded = any(row.get("predicted_most_bytes") is not None for row in rows)
    right = "within the predicted bounds" if bounded else "as predicted, to the byte"
    title = f"sent in one step, over all ranks: {right if exact else 'NOT as predicted'}"
    table = Table(box=None)
    for heading in ("axis", "operation", "purpose", "calls", "payload", "wire"):
        number = heading in ("calls", "payload", "wire")
        table.add_column(heading, justify="right" if number else "left", no_wrap=number, overflow="fold")
    for (axis, operation, purpose), alike in sorted(merged.items()):
        total = {name: sum(row[name] for row in alike) for name in _SUMMED}
        every = alike[0].get("every", 1)
        table.add_row(
            axis,
            operation,
            purpose + (f" (every {every} steps)" if every > 1 else ""),
            f"{total['calls']:,}",
            bytes_text(total["payload_bytes"]),
            bytes_text(total["wire_bytes"]),
        )
        if not all(matches_prediction(row) for row in alike):
            said = f"[red]{total['predicted_calls']:,}[/]", f"[red]{bytes_text(total['predicted_payload_bytes'])}[/]"
            table.add_row("", "", "[red]predicted[/]", *said, "")
    return Group(Text(title, style="green" if exact else "red"), table)  # a table's own title wraps at its width


def _files(directory: Path) -> list[tuple[str, Text]]:
    names = [name for name in FILES if (directory / name).exists()]
    rows = [("run", Text(str(directory))), ("", Text("  ".join(names), "dim"))]
    checkpoints = sorted((directory / "checkpoints").glob("step_*"), key=lambda path: int(path.name.split("_")[1]))
    if checkpoints:
        rows.append(("", Text(f"last checkpoint {checkpoints[-1].name}: resume={directory}")))
    return rows
