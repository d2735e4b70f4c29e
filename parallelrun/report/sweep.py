"""The table of a sweep, from its directory's files (`results.jsonl`, written by `cli.sweep`). No torch."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parallelrun.records import write_text

if TYPE_CHECKING:
    from rich.table import Table

RESULTS = "results.jsonl"
_RECORD = {"run": "summary.json", "bench": "bench.json", "verify": "verify.json"}
_FIRST = ("point", "state", "reason", "directory", "exit_code")
_COLUMNS = (
    ("world", "ranks"),
    ("loss", "loss"),
    ("val_loss", "val loss"),
    ("val_top1", "top-1"),
    ("max_vio", "max vio"),
    ("drop_rate", "dropped"),
    ("step_time_median_s", "step s"),
    ("median_s", "step s"),
    ("tokens_per_s", "tokens/s"),
    ("wire_bytes_per_step", "sent a step"),
    ("passed", "verified"),
    ("max_error.params", "error"),
)
_DROPPED_FIRST = ("ranks", "loss", "error", "sent a step")  # on a narrow terminal; results.csv has everything
_MAX_ROWS = 200


def read(directory: Path) -> list[dict[str, Any]]:
    """The rows of a sweep by point; of a point that was run again, the last row. A torn last line is left out."""
    rows: dict[str, dict[str, Any]] = {}
    try:
        lines = (directory / RESULTS).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    for line in lines:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        key = row.get("config_sha256") or f"point {row.get('point')}"
        rows[key] = row
    return sorted(rows.values(), key=lambda row: row.get("point", 0))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file's object, or {} when there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return {}
    return value if isinstance(value, dict) else {}


def summary(directory: Path, verb: str) -> dict[str, Any]:
    """One flat row of a run directory: its summary.json, bench.json or verify.json; nested values dotted."""
    flat: dict[str, Any] = {}
    for key, value in read_json(directory / _RECORD[verb]).items():
        if isinstance(value, dict):
            flat |= {f"{key}.{inner}": item for inner, item in value.items() if not isinstance(item, (dict, list))}
        elif key not in ("schema", "overrides", "state") and not isinstance(value, list):
            flat[key] = value
    return flat


def write_csv(directory: Path) -> None:
    """results.csv: the rows of results.jsonl, one line each, every column that any row has."""
    rows = [{key: _cell(value) for key, value in row.items()} for row in read(directory)]
    columns = list(dict.fromkeys([*_FIRST, *(key for row in rows for key in row)]))
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, [column for column in columns if column not in ("schema", "problems")],
                            extrasaction="ignore", lineterminator="\n")  # fmt: skip
    writer.writeheader()
    writer.writerows(rows)
    write_text(directory / "results.csv", text.getvalue())


def _cell(value: Any) -> Any:
    return " ".join(map(str, value)) if isinstance(value, list) else value


def varied(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Per row, the overrides that are not common to all rows."""
    common = set.intersection(*(set(row.get("overrides", ())) for row in rows)) if len(rows) > 1 else set()
    return [[text for text in row.get("overrides", ()) if text not in common] for row in rows]


def show(directory: Path) -> None:
    """Print one table with a line per point, the reasons below it, and where the files lie."""
    from rich.console import Console

    rows = read(directory)
    present = [(key, title) for key, title in _COLUMNS if any(row.get(key) is not None for row in rows)]
    columns = [(key, title) for i, (key, title) in enumerate(present) if title not in [t for _, t in present[:i]]]
    console, endless, left_out = Console(), Console(width=10_000), []
    while (width := endless.measure(table := _table(rows, columns)).maximum) > console.width and columns:
        if not console.is_terminal:  # a file has room
            console = Console(width=width)
            break
        dropped = next((title for title in _DROPPED_FIRST if title in [t for _, t in columns]), columns[-1][1])
        columns = [(key, title) for key, title in columns if title != dropped]
        left_out.append(dropped)
    console.print(table)
    if left_out:
        console.print(f"no room for: {', '.join(left_out)}", highlight=False)
    names = varied(rows)
    for row, name in list(zip(rows, names))[:_MAX_ROWS]:
        if row.get("reason"):
            place = f" ({row['directory']})" if row.get("directory") else ""
            text = f"# {row['point']} {' '.join(name)}: {row['state']}: {row['reason']}{place}"
            console.print(text, markup=False, highlight=False)
        for note in row.get("notes", ()):
            console.print(f"# {row['point']} note: {note}", markup=False, highlight=False)
    if len(rows) > _MAX_ROWS:
        console.print(f"... {len(rows) - _MAX_ROWS} more points in {RESULTS}")
    console.print(f"results: {directory / 'results.csv'}", soft_wrap=True, highlight=False)


def _table(rows: list[dict[str, Any]], columns: Sequence[tuple[str, str]]) -> Table:
    from rich.table import Table

    table = Table(title=f"sweep of {len(rows)} points", title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("#", justify="right", no_wrap=True)
    names = varied(rows)
    swept = list(dict.fromkeys(text.partition("=")[0] for name in names for text in name))
    for key in swept:
        table.add_column(key, no_wrap=len(swept) < 4, overflow="fold")
    table.add_column("state", no_wrap=True)
    for _, title in columns:
        table.add_column(title, justify="right", no_wrap=True)
    for row, name in list(zip(rows, names))[:_MAX_ROWS]:
        cells = [_cell_text(key, row.get(key)) for key, _ in columns]
        values = dict(text.split("=", 1) for text in name)
        table.add_row(str(row["point"]), *(values.get(key, "") for key in swept), row["state"], *cells)
    return table


def _cell_text(key: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None or isinstance(value, str):
        return value or ""
    if key == "tokens_per_s":
        return f"{value:,.0f}"
    if key.startswith("wire_bytes"):
        return _bytes(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"
