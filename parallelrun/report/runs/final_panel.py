"""The final panel of a run, drawn from its files: losses, speed, what was sent, and the paths of the files."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.panel import Panel
from rich.text import Text

from parallelrun.base.wording import counted
from parallelrun.planner.predict.prediction import matches_prediction
from parallelrun.report.figures import ROUNDING, bytes_text, degrees_text, seconds_text
from parallelrun.report.plans import predicted
from parallelrun.report.records.metrics import METRICS
from parallelrun.report.runs import expert_load
from parallelrun.report.screen import FRAME, LABEL, WIDEST, labelled, open_console, table

BARS = "▁▂▃▄▅▆▇█"
FILES = (
    "config.yaml", "plan.json", "metrics.jsonl", "routing.jsonl", "comm.json", "schedule.json",
    "summary.json", "servers.json", "logs",
)  # fmt: skip
PARTS = ("compute_s", "comm_exposed_s", "data_s")  # of a step's time
_SUMMED = ("calls", "predicted_calls", "payload_bytes", "predicted_payload_bytes", "wire_bytes")  # of comm.json's rows


def sparkline(values: list[float], width: int = 60) -> str:
    """Return bars from lowest to highest, the values averaged into at most `width`; gaps where none is finite."""
    if not values:
        return ""
    width = min(width, len(values))
    cells = []
    for column in range(width):
        part = values[column * len(values) // width : (column + 1) * len(values) // width]
        good = [value for value in part if value is not None and math.isfinite(value)]
        cells.append(sum(good) / len(good) if good else None)
    shown = [cell for cell in cells if cell is not None]
    low, high = min(shown, default=0.0), max(shown, default=0.0)
    span = high - low if high - low > ROUNDING * max(abs(low), abs(high)) else math.inf
    return "".join(" " if cell is None else BARS[int((cell - low) / span * (len(BARS) - 1))] for cell in cells)


def show(directory: Path, console: Console | None = None) -> None:
    """Draw a finished run from its metrics.jsonl, summary.json and comm.json; without a terminal as lines."""
    console = console or open_console()
    summary = json.loads((directory / "summary.json").read_text())
    metrics = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    communication = json.loads((directory / "comm.json").read_text())["rows"]
    width = min(console.width, WIDEST)
    rows = [*_losses(metrics, summary, width - FRAME), ("", Text("")), *_speed(summary)]
    parts: list[Any] = [labelled(rows)]
    experts = expert_load.panel(directory, summary, console)
    if experts:
        parts += [Text(""), experts]
    if communication:
        parts += [Text(""), communication_table(communication)]
    parts += [Text(""), labelled(_files(directory))]
    degrees = degrees_text({axis: summary.get(axis, 1) for axis in ("dp", "cp", "tp", "pp", "ep")})
    title = f"{summary['model']} · {summary['strategy']} · {degrees} · {summary['state']}"
    if console.is_terminal:
        console.print(Panel(Group(*parts), title=title, expand=False))
    else:
        console.print(Text(title, "bold"), *parts, sep="\n")
    if (checkpoint := _last_checkpoint(directory)) is not None:  # to be copied
        console.print(
            f"last checkpoint {checkpoint}: {shlex.quote(f'resume={directory}')}", markup=False, soft_wrap=True
        )


def _losses(metrics: list[dict[str, Any]], summary: dict[str, Any], width: int) -> list[tuple[str, Text]]:
    rows = []
    for name, form, style in (("loss", ".4f", "green"), ("val_loss", ".4f", "cyan"), ("val_top1", ".1%", "cyan")):
        values = [row[name] for row in metrics if name in row]
        if values:
            first, last = f"{values[0]:{form}} ", f" {values[-1]:{form}}" if len(values) > 1 else ""
            bars = sparkline(values, min(60, width - LABEL - len(first) - len(last))) if len(values) > 1 else ""
            rows.append((name, Text.assemble(first, (bars, style), last)))
    steps, samples = counted(summary["steps"], "step"), counted(summary["global_batch"], "sample")
    return [*rows, ("", Text(f"{steps} of {samples}, {summary['parameters']:,} parameters"))]


def _speed(summary: dict[str, Any]) -> list[tuple[str, Text]]:
    rows = []
    if summary["step_time_median_s"] is not None:  # None: this attempt has only repaired the end of the run
        speed = Text(f"{summary['step_time_median_s'] * 1e3:.0f} ms a step (median), {_rate(summary)}")
        rows.append(("speed", speed.append(_parts_of_a_step(summary))))
    if summary.get("predicted"):
        rows.append(("predicted", Text(predicted.text(summary["predicted"], summary["step_time_median_s"]))))
    if summary.get("bubble_measured") is not None and summary["pp"] > 1:
        measured = f"{summary['bubble_measured']:.0%} of a step measured ({seconds_text(summary['bubble_s'])})"
        rows.append(("bubble", Text(f"{measured}, {summary['bubble_predicted']:.0%} predicted")))
    if summary.get("staleness_mean") is not None:
        rows.append(("staleness", Text(_staleness(summary))))
    if summary.get("restarts"):
        lost, again = seconds_text(summary["restart_lost_s"]), counted(summary["repeated_steps"], "step")
        rows.append(("restarts", Text(f"{summary['restarts']}: {lost} lost, {again} repeated")))
    rows.append(("memory", Text(f"{bytes_text(summary['peak_memory_bytes'])} at the peak of the largest rank")))
    if summary.get("save_pause_median_s") is not None:
        rows.append(("saving", Text(_saving(summary))))
    crowd = summary["ranks_per_core"]
    if crowd and crowd > 1:
        world, cores = summary["world"], counted(round(summary["world"] / crowd), "core")
        rows.append(("", Text(f"step time is no scaling measurement: {world} ranks on {cores}", "yellow")))
    return rows


def _saving(summary: dict[str, Any]) -> str:
    saves, write_s = counted(summary["saves"], "checkpoint"), summary["save_write_median_s"]
    written = f" and took {seconds_text(write_s)} to write" if write_s is not None else ""
    return f"{saves}; a save paused training for {seconds_text(summary['save_pause_median_s'])}{written}"


def _staleness(summary: dict[str, Any]) -> str:
    """Return how many updates of others came between a worker's read and its own, and the workers' distance."""
    most, gap = counted(summary["staleness_max"], "update"), counted(summary["clock_gap_max"], "step")
    text = f"{summary['staleness_mean']:.2f} updates on average, at most {most}; workers at most {gap} apart"
    bound = summary.get("staleness_bound")
    dropped = f"; {counted(summary['dropped_gradients'], 'gradient')} dropped" if summary["dropped_gradients"] else ""
    return text + (f" (bound {bound})" if bound is not None else "") + dropped


def _rate(summary: dict[str, Any]) -> str:
    """Return tokens/s, or samples/s where each sample has one target."""
    tokens, samples = summary["tokens_per_s"], summary.get("samples_per_s")
    return f"{samples:,.0f} samples/s" if samples == tokens else f"{tokens:,.0f} tokens/s"


def _parts_of_a_step(summary: dict[str, Any]) -> str:
    """Return the parts of a step's time, averaged over ranks; empty where waits were not timed, and for one rank."""
    if summary.get("bubble_measured") is None or summary["world"] == 1:
        return ""
    return "\n" + ", ".join(f"{METRICS[key].title} {seconds_text(summary[key])}" for key in PARTS)


def communication_table(rows: list[dict[str, Any]]) -> Group:
    """Return a row per axis, operation and purpose, for one step; below it the prediction, if it differs."""
    totals = sent(rows)
    exact = all(total["as predicted"] for total in totals.values())
    bounded = any(row.get("predicted_most_bytes") is not None for row in rows)
    right = "within the predicted bounds" if bounded else "as predicted, to the byte"
    title = f"sent in one step, over all ranks: {right if exact else 'NOT as predicted'}"
    drawn = table("axis", "operation", "purpose", ">calls", ">payload", ">wire", rule=False, padding=(0, 2, 0, 0))
    for (axis, operation, purpose), total in sorted(totals.items()):
        often = f" (every {total['every']} steps)" if total["every"] > 1 else ""
        sizes = bytes_text(total["payload_bytes"]), bytes_text(total["wire_bytes"])
        drawn.add_row(axis, operation, purpose + often, f"{total['calls']:,}", *sizes)
        if not total["as predicted"]:
            predicted = f"{total['predicted_calls']:,}", bytes_text(total["predicted_payload_bytes"])
            drawn.add_row("", "", "predicted", *predicted, "", style="red")
    return Group(Text(title, style="green" if exact else "red"), drawn)


def sent(rows: Iterable[dict[str, Any]]) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Return the sums over ranks of comm.json's rows by (axis, operation, purpose), and whether all are as predicted.

    Receives are left out: their bytes are counted at the sender.
    """
    totals: dict[tuple[str, str, str], dict[str, Any]] = {}
    for row in rows:
        if row["operation"] != "recv":
            key = str(row["axis"]), str(row["operation"]), str(row["purpose"])
            begin = {**dict.fromkeys(_SUMMED, 0), "every": row.get("every", 1), "as predicted": True}
            total = totals.setdefault(key, begin)
            total |= {name: total[name] + row[name] for name in _SUMMED}
            total["as predicted"] &= matches_prediction(row)
    return totals


def _files(directory: Path) -> list[tuple[str, Text]]:
    names = [name for name in FILES if (directory / name).exists()]
    return [("run", Text(str(directory))), ("", Text("  ".join(names), "dim"))]


def _last_checkpoint(directory: Path) -> str | None:
    names = [path.name for path in (directory / "checkpoints").glob("step_*")]
    return max(names, key=lambda name: int(name.split("_")[1]), default=None)
