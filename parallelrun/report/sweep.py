"""The table of a sweep, from its directory's files (`results.jsonl`, written by `cli.sweep`). No torch."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parallelrun.records import write_text

RESULTS = "results.jsonl"
_RECORD = {"run": "summary.json", "bench": "bench.json", "verify": "verify.json"}
_FIRST = ("point", "state", "reason", "directory", "exit_code")
_COLUMNS = (
    ("world", "ranks"),
    ("loss", "loss"),
    ("val_loss", "val loss"),
    ("step_time_median_s", "step s"),
    ("median_s", "step s"),
    ("tokens_per_s", "tokens/s"),
    ("wire_bytes_per_step", "bytes/step"),
    ("passed", "verified"),
    ("max_error.params", "error"),
)
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
    """Print one table with a line per point, and where the files lie."""
    from rich.console import Console
    from rich.table import Table

    rows = read(directory)
    names = varied(rows)
    present = [(key, title) for key, title in _COLUMNS if any(row.get(key) is not None for row in rows)]
    columns = [(key, title) for i, (key, title) in enumerate(present) if title not in [t for _, t in present[:i]]]
    table = Table(title=f"sweep of {len(rows)} points", title_justify="left")
    for title in ("point", "state", *(title for _, title in columns)):
        table.add_column(title, overflow="fold")
    table.add_column("reason or directory", overflow="fold", ratio=1)
    for row, name in list(zip(rows, names))[:_MAX_ROWS]:
        cells = [_number(row.get(key)) for key, _ in columns]
        note = row.get("reason") or row.get("directory", "")
        if row["state"] != "done" and row.get("directory") and row.get("reason"):
            note = f"{note} ({row['directory']})"
        table.add_row(" ".join(name) or str(row["point"]), row["state"], *cells, str(note))
    console = Console()
    console.print(table)
    if len(rows) > _MAX_ROWS:
        console.print(f"... {len(rows) - _MAX_ROWS} more points in {RESULTS}")
    console.print(f"results: {directory / 'results.csv'}", soft_wrap=True, highlight=False)


def _number(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.5g}" if isinstance(value, float) else "" if value is None else str(value)
