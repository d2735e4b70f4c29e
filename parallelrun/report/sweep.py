"""The table of a sweep, from its directory's files (`results.jsonl`, written by `cli.sweep`). No torch."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parallelrun.records import write_text
from parallelrun.report.figures import bytes_text, degrees_text, seconds_text
from parallelrun.wording import counted

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

RESULTS = "results.jsonl"
_RECORD = {"run": "summary.json", "bench": "bench.json", "verify": "verify.json"}
DEGREES = ("world", "dp", "tp", "pp", "ep", "servers")
FINISHED = ("done", "planned")  # states of points that have figures
_FIRST = ("point", "state", "same_as", "reason", "directory", "exit_code")
_NOT_IN_CSV = ("schema", "problems", "invocation")
_COLUMNS = (
    ("loss", "loss"),
    ("val_loss", "val loss"),
    ("val_top1", "top-1"),
    ("max_vio", "max vio"),
    ("drop_rate", "dropped"),
    ("step_time_median_s", "step time"),
    ("median_s", "step time"),
    ("tokens_per_s", "tokens/s"),
    ("efficiency", "efficiency"),
    ("wire_bytes_per_step", "sent a step"),
    ("fits", "fits"),
    ("memory_bytes", "memory"),
    ("step_time_predicted_s", "step time"),
    ("passed", "verified"),
    ("max_error.params", "error"),
)
_DROPPED_FIRST = ("loss", "error", "sent a step")  # on a narrow terminal; results.csv has everything
_MAX_ROWS = 200


def read(directory: Path) -> list[dict[str, Any]]:
    """The rows of a sweep, by point: of every configuration those of the last invocation that had it, so that a point
    that was run again counts once, and a repeated point of one invocation is listed. A torn last line is left out."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    try:
        lines = (directory / RESULTS).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    for line in lines:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        alike = found.setdefault(row.get("config_sha256") or f"point {row.get('point')}", {})
        if any(old.get("invocation") != row.get("invocation") for old in alike.values()):
            alike.clear()
        alike[row.get("point", 0)] = row
    rows = [row for alike in found.values() for row in alike.values()]
    return sorted(rows, key=lambda row: row.get("point", 0))


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
    """results.csv: the rows of results.jsonl, one line each; every column that any row has, every override's key."""
    found = with_efficiency(read(directory))
    rows = [{**overridden(row), **{key: _cell(value) for key, value in row.items()}} for row in found]
    keys = [key for row in found for key in overridden(row)]
    columns = dict.fromkeys([*_FIRST, *keys, *DEGREES, *(key for row in rows for key in row)])
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, [column for column in columns if column not in _NOT_IN_CSV],
                            extrasaction="ignore", lineterminator="\n")  # fmt: skip
    writer.writeheader()
    writer.writerows(rows)
    write_text(directory / "results.csv", text.getvalue())


def with_efficiency(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, with `scaling` (strong | weak) and `efficiency` where points differ only in world and degrees."""
    from parallelrun.report.scaling import efficiencies

    known = efficiencies(rows)
    names = ("scaling", "efficiency")
    return [{**row, **dict(zip(names, known[row["point"]]))} if row["point"] in known else row for row in rows]


def overridden(row: dict[str, Any]) -> dict[str, str]:
    """The overrides of a point by key."""
    return dict(text.split("=", 1) for text in row.get("overrides", ()))


def _cell(value: Any) -> Any:
    return " ".join(map(str, value)) if isinstance(value, list) else value


def varied(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Per row, the overrides that are not common to all rows."""
    common = set.intersection(*(set(row.get("overrides", ())) for row in rows)) if len(rows) > 1 else set()
    return [[text for text in row.get("overrides", ()) if text not in common] for row in rows]


def show(directory: Path) -> None:
    """Print the table of a sweep and where its files are."""
    from parallelrun.report.screen import open_console

    console = open_console()
    show_table(read(directory), console)
    console.print(f"results: {directory / 'results.csv'}", soft_wrap=True, highlight=False)


def show_table(rows: list[dict[str, Any]], console: Console) -> None:
    """Print one table with a line per point, and the reasons below it."""
    rows = with_efficiency(rows)
    present = [(key, title) for key, title in _COLUMNS if any(row.get(key) is not None for row in rows)]
    columns = [(key, title) for i, (key, title) in enumerate(present) if title not in [t for _, t in present[:i]]]
    left_out = []
    while _width(table := _table(rows, columns)) > console.width and columns:
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
            point = " ".join((f"# {row['point']}", *name))
            text = f"{point}: {row['state']}: {row['reason']}{place}"
            console.print(text, markup=False, highlight=False, soft_wrap=True)
        for note in row.get("notes", ()):
            console.print(f"# {row['point']} note: {note}", markup=False, highlight=False, soft_wrap=True)
    kinds = sorted({row["scaling"] for row in rows if "scaling" in row})
    if kinds:
        said = " and ".join(kinds)
        note = f"efficiency: {said} scaling, samples a second of a rank against the smallest world's"
        crowded = any((row.get("ranks_per_core") or 0) > 1 for row in rows if "scaling" in row)
        console.print(note + ("; ranks shared cores: no scaling measurement" if crowded else ""), soft_wrap=True)
    if len(rows) > _MAX_ROWS:
        console.print(f"... {counted(len(rows) - _MAX_ROWS, 'more point')} in {RESULTS}")


def _width(table: Table) -> int:
    from rich.console import Console

    return Console(width=10_000).measure(table).maximum


def _table(rows: list[dict[str, Any]], columns: Sequence[tuple[str, str]]) -> Table:
    from rich.table import Table

    title = f"sweep of {counted(len(rows), 'point')}"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("#", justify="right", no_wrap=True)
    names = varied(rows)
    swept = [key for key in dict.fromkeys(text.partition("=")[0] for name in names for text in name) if key != "world"]
    for key in swept:
        table.add_column(key, no_wrap=len(swept) < 4, overflow="fold")
    table.add_column("state", no_wrap=True)
    table.add_column("world", justify="right", no_wrap=True)
    table.add_column("degrees", no_wrap=True)
    for _, title in columns:
        table.add_column(title, justify="right", no_wrap=True)
    for row, name in list(zip(rows, names))[:_MAX_ROWS]:
        given = overridden({"overrides": name})
        cells = [str(row["point"]), *(given.get(key, "") for key in swept), _state(row)]
        cells += [str(row.get("world", given.get("world", ""))), _degrees(row)]
        table.add_row(*cells, *(_cell_text(key, row.get(key)) for key, _ in columns))
    return table


def _state(row: dict[str, Any]) -> str:
    return f"same as {row['same_as']}" if "same_as" in row else row["state"]


def _degrees(row: dict[str, Any]) -> str:
    """`dp=2 tp=2 servers=1`; empty where the point was refused before its degrees were known."""
    if "dp" not in row:
        return ""
    servers = row.get("servers") or 0
    return degrees_text({axis: row[axis] for axis in DEGREES[1:-1]}) + (f" servers={servers}" if servers else "")


def _cell_text(key: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None or isinstance(value, str):
        return value or ""
    if key == "efficiency":
        return f"{value:.0%}"
    if key == "tokens_per_s":
        return f"{value:,.0f}"
    if key.endswith("_s"):
        return seconds_text(value)
    if "bytes" in key:
        return bytes_text(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)
