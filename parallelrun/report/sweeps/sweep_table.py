"""The table of a sweep, and its results.csv."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from parallelrun.base.records import write_text
from parallelrun.base.wording import counted
from parallelrun.report.figures import csv_text, degrees_text
from parallelrun.report.records.metrics import METRICS, NUMBER, metric_text, unit_of
from parallelrun.report.screen import NO_LIMIT, open_console, table
from parallelrun.report.sweeps import sweep_rows
from parallelrun.report.sweeps.scaling import efficiencies
from parallelrun.report.sweeps.sweep_rows import DEGREES, PLANNED, RESULTS, overridden

CSV = "results.csv"
_FIRST = ("point", "state", "same_as", "reason", "directory", "exit_code")
_NOT_IN_CSV = ("schema", "problems", "invocation")
_COLUMNS = (
    "loss", "val_loss", "val_top1", "max_vio", "drop_rate", "step_time_median_s", "median_s", "predicted.step_s",
    "bubble_predicted", "tokens_per_s", "efficiency", "wire_bytes_per_step", "passed", "max_error.params",
)  # fmt: skip
_COLUMNS_OF_PLANS = (
    "fits", "memory_bytes", "step_time_predicted_s", "tokens_per_s", "samples_per_s", "training_days",
    "training_price", "bubble_predicted", "wire_bytes_per_step",
)  # fmt: skip
_DROPPED_FIRST = ("loss", "error", "sent a step")  # on a narrow terminal; results.csv has everything
_MAX_ROWS = 200
BOUND = "*"  # after figures that follow from a bound on the step time


def write_csv(directory: Path) -> None:
    """Write results.csv: the rows of results.jsonl, with a column for every override's key and every field."""
    points = with_efficiency(sweep_rows.read(directory))
    rows = [{**overridden(row), **{k: " ".join(map(str, v)) if isinstance(v, list) else v for k, v in row.items()}}
            for row in points]  # fmt: skip
    keys = [key for row in points for key in overridden(row)]
    columns = dict.fromkeys([*_FIRST, *keys, *DEGREES, *(key for row in rows for key in row)])
    shown = [column for column in columns if column not in _NOT_IN_CSV]
    write_text(directory / CSV, csv_text([shown, *([row.get(name, "") for name in shown] for row in rows)]))


def with_efficiency(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows, with `scaling` and `efficiency` where points differ only in world and degrees."""
    by_point = efficiencies(rows)
    names = ("scaling", "efficiency")
    return [{**row, **dict(zip(names, by_point[row["point"]]))} if row["point"] in by_point else row for row in rows]


def show(directory: Path) -> None:
    """Print the table of a sweep and the path of its results."""
    console = open_console()
    show_table(sweep_rows.read(directory), console)
    console.print(f"results: {directory / CSV}", soft_wrap=True)


def show_plans(rows: list[dict[str, Any]]) -> None:
    """Print the table of a sweep of plans, a line per point."""
    show_table(rows, open_console())
    illegal = sum(row["state"] == "skipped" and "same_as" not in row for row in rows)
    print(f"{len(rows) - illegal} of {len(rows)} points are legal")


def show_table(rows: list[dict[str, Any]], console: Console) -> None:
    """Print one table with a line per point, and the reasons and notes of the points below it."""
    rows, order = _ordered(with_efficiency(rows))
    columns = _columns(rows)
    left_out = []
    while Console(width=NO_LIMIT).measure(drawn := _table(rows, columns)).maximum > console.width and columns:
        left_out.append(next((title for title in _DROPPED_FIRST if title in columns), [*columns][-1]))
        del columns[left_out[-1]]
    console.print(drawn)
    lines = [f"left out, because the terminal is narrow: {', '.join(left_out)}"] if left_out else []
    lines += [order] if order else []
    for row, names in list(zip(rows, sweep_rows.varied(rows)))[:_MAX_ROWS]:
        if row.get("reason"):
            directory = f" ({row['directory']})" if row.get("directory") else ""
            lines.append(f"# {' '.join((str(row['point']), *names))}: {row['state']}: {row['reason']}{directory}")
        lines += [f"# {row['point']} note: {note}" for note in row.get("notes", ())]
    scaled = [row for row in rows if "scaling" in row]
    if scaled:
        kinds = " and ".join(sorted({row["scaling"] for row in scaled}))
        lines.append(f"efficiency: {kinds} scaling, samples/s of a rank over those of a rank of the smallest world")
    if any(_is_bound(row, key) for row in rows for key in columns.values()):
        lines.append(f"{BOUND} not predicted: computation at the peak rate, then communication at the links' rates")
    if len(rows) > _MAX_ROWS:
        lines.append(f"... {counted(len(rows) - _MAX_ROWS, 'more point')} in {RESULTS}")
    for line in lines:
        console.print(line, markup=False)


def _ordered(rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """Return the rows in the order of the table, and a sentence about it.

    Where ranks shared cores, measured times say nothing of the points, and predicted ones order them.
    """
    if not any(sweep_rows.is_crowded(row) for row in rows):
        return rows, ""
    note = "step time is no scaling measurement: ranks shared cores"
    finished = [row for row in rows if row["state"] == "done"]
    for key in ("predicted.step_s", "bubble_predicted"):
        if any(row.get(key) for row in finished) and all(row.get(key) is not None for row in finished):
            rows = sorted(rows, key=lambda row: row[key] if row["state"] == "done" else inf)
            return rows, f"{note}; the points are ordered by their {METRICS[key].label}"
    return rows, note


def _columns(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """title -> key of the figures that any row has; of keys with one title, the first."""
    planned = any(row["state"] == PLANNED for row in rows)
    keys = [key for key in (_COLUMNS_OF_PLANS if planned else _COLUMNS)
            if any(row.get(key) is not None for row in rows)
            and (key != "bubble_predicted" or planned or any(row.get(key) for row in rows))]  # fmt: skip
    columns = {METRICS[key].title.removeprefix("predicted " * planned): key for key in reversed(keys)}
    if planned and "tokens/s" in columns:  # of language models
        columns.pop("samples/s")
    return dict(reversed(columns.items()))


def _table(rows: list[dict[str, Any]], columns: dict[str, str]) -> Table:
    """columns: title -> key."""
    names = sweep_rows.varied(rows)
    swept = [key for key in dict.fromkeys(text.partition("=")[0] for name in names for text in name) if key != "world"]
    titles = [">#", *swept, "state", ">world", "degrees", *(f">{title}" for title in columns)]
    title = f"sweep of {counted(len(rows), 'point')}"
    drawn = table(*titles, rule=False, title=title, title_justify="left", padding=(0, 2, 0, 0))
    for column in drawn.columns:
        column.no_wrap = column.no_wrap or column.header not in swept or len(swept) < 4
    for row, name in list(zip(rows, names))[:_MAX_ROWS]:
        overrides = overridden({"overrides": name})
        state = f"same as {row['same_as']}" if "same_as" in row else row["state"]
        cells = [str(row["point"]), *(overrides.get(key, "") for key in swept), state]
        cells += [str(row.get("world", overrides.get("world", ""))), _degrees(row)]
        figures = [_cell_text(key, row.get(key)) + BOUND * _is_bound(row, key) for key in columns.values()]
        drawn.add_row(*cells, *figures)
    return drawn


def _is_bound(row: dict[str, Any], key: str) -> bool:
    """Whether a figure follows from a bound on the step time instead of a prediction."""
    return bool(row.get("step_time_is_bound")) and key.endswith(("_s", "_days"))


def _degrees(row: dict[str, Any]) -> str:
    """`dp=2 tp=2 servers=1`; empty where the point was refused before its degrees were known."""
    if "dp" not in row:
        return ""
    servers = row.get("servers") or 0
    return degrees_text({axis: row.get(axis, 1) for axis in DEGREES[1:-1]}) + (f" servers={servers}" if servers else "")


def _cell_text(key: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None or isinstance(value, str):
        return value or ""
    if unit_of(key) == NUMBER:
        return f"{value:.4g}" if isinstance(value, float) else str(value)
    return metric_text(key, value)
