"""The final panel of a run: how the loss went, how fast, what was sent, and where everything lies. Reads the files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from parallelrun.plan.account import as_predicted
from parallelrun.report import routing
from parallelrun.report.figures import bytes_text, degrees_text, seconds_text

BARS = "▁▂▃▄▅▆▇█"
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
    """Draw the panel of a finished run from its metrics.jsonl, summary.json and comm.json."""
    console = console or Console(highlight=False)
    summary = json.loads((directory / "summary.json").read_text())
    metrics = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    communication = json.loads((directory / "comm.json").read_text())["rows"]
    parts: list[Any] = [_losses(metrics, summary), Text(""), _speed(summary)]
    experts = routing.panel(directory, summary, console)
    if experts:
        parts += [Text(""), experts]
    if communication:
        parts += [Text(""), communication_table(communication)]
    parts += [Text(""), _files(directory)]
    degrees = degrees_text({axis: summary.get(axis, 1) for axis in ("dp", "tp", "pp", "ep")})
    title = f"{summary['model']} · {summary['strategy']} · {degrees} · {summary['state']}"
    console.print(Panel(Group(*parts), title=title, expand=False))


def _losses(metrics: list[dict[str, Any]], summary: dict[str, Any]) -> Text:
    losses = [row["loss"] for row in metrics]
    text = Text.assemble(
        ("loss      ", "bold"), f"{losses[0]:.4f} ", (sparkline(losses), "green"), f" {losses[-1]:.4f}"
    )
    for name, form in (("val_loss", ".4f"), ("val_top1", ".1%")):
        evaluated = [row[name] for row in metrics if name in row]
        if evaluated:
            text.append(f"\n{name}  ", "bold")
            text.append(f"{evaluated[0]:{form}} ")
            text.append(sparkline(evaluated), "cyan")
            text.append(f" {evaluated[-1]:{form}}")
    text.append(
        f"\n{summary['steps']} steps of {summary['global_batch']} samples, {summary['parameters']:,} parameters"
    )
    return text


def _speed(summary: dict[str, Any]) -> Text:
    median = summary["step_time_median_s"]
    text = Text.assemble(("speed     ", "bold"), f"{median * 1e3:.0f} ms a step (median), {_rate(summary)}")
    text.append(_parts_of_a_step(summary))
    text.append(f"\nmemory    {bytes_text(summary['peak_memory_bytes'])} at the peak of the largest rank")
    crowd = summary["ranks_per_core"]
    if crowd and crowd > 1:
        cores = round(summary["world"] / crowd)
        text.append(
            f"\n          step time is no scaling measurement: {summary['world']} ranks on {cores} cores", "yellow"
        )
    return text


def _rate(summary: dict[str, Any]) -> str:
    """Tokens a second; samples where each has one target."""
    tokens, samples = summary["tokens_per_s"], summary.get("samples_per_s")
    return f"{samples:,.0f} samples/s" if samples == tokens else f"{tokens:,.0f} tokens/s"


def _parts_of_a_step(summary: dict[str, Any]) -> str:
    """Where the time of a step goes, mean over ranks: nothing where waits were not timed, nor for one rank."""
    names = {"compute_s": "computing", "comm_exposed_s": "waiting to communicate", "data_s": "data"}
    if summary.get("bubble_measured") is None or summary["world"] == 1:
        return ""
    parts = [f"{name} {seconds_text(summary[key])}" for key, name in names.items()]
    text = "\n          " + ", ".join(parts)
    if summary["pp"] > 1:
        text += (
            f"\nbubble    {summary['bubble_measured']:.0%} of a step measured ({seconds_text(summary['bubble_s'])}), "
            f"{summary['bubble_predicted']:.0%} predicted"
        )
    return text


def communication_table(rows: list[dict[str, Any]]) -> Group:
    """One row per axis, operation and purpose, summed over ranks: measured beside predicted, for one step.

    Receives are left out: their bytes are counted at the sender.
    """
    rows = [row for row in rows if row["operation"] != "recv"]
    merged: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        merged.setdefault((row["axis"], row["operation"], row["purpose"]), []).append(row)
    exact = all(as_predicted(row) for row in rows)
    bounded = any(row.get("predicted_most_bytes") is not None for row in rows)
    right = "within the predicted bounds" if bounded else "as predicted, to the byte"
    title = f"sent in one step, over all ranks: {right if exact else 'NOT as predicted'}"
    table = Table(box=None)
    for heading in ("axis", "operation", "purpose", "calls", "payload", "wire"):
        table.add_column(heading, justify="right" if heading in ("calls", "payload", "wire") else "left", no_wrap=True)
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
        if not all(as_predicted(row) for row in alike):
            said = f"[red]{total['predicted_calls']:,}[/]", f"[red]{bytes_text(total['predicted_payload_bytes'])}[/]"
            table.add_row("", "", "[red]predicted[/]", *said, "")
    return Group(Text(title, style="green" if exact else "red"), table)  # a table's own title wraps at its width


def _files(directory: Path) -> Text:
    text = Text.assemble(("run       ", "bold"), str(directory))
    names = [
        name
        for name in (
            "config.yaml",
            "plan.json",
            "metrics.jsonl",
            "routing.jsonl",
            "routing.svg",
            "comm.json",
            "summary.json",
            "profile",
            "logs",
        )
        if (directory / name).exists()
    ]
    text.append("\n          " + "  ".join(names), "dim")
    checkpoints = sorted((directory / "checkpoints").glob("step_*"), key=lambda path: int(path.name.split("_")[1]))
    if checkpoints:
        text.append(f"\n          last checkpoint {checkpoints[-1].name}: resume={directory}")
    return text
