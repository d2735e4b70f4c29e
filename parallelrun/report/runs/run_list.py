"""The tables of `parallelrun runs`: all runs, and one run."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from parallelrun.base.wording import counted
from parallelrun.report.figures import bytes_text
from parallelrun.report.records import attempts
from parallelrun.report.records.metrics import METRICS, metric_text
from parallelrun.report.records.read import RunRecord, is_number
from parallelrun.report.records.rows import STYLES, RunRow
from parallelrun.report.screen import labelled, print_command

_COLUMNS = ("loss", "val_loss", "tokens_per_s", "step_time_median_s", "peak_memory_bytes")
_NUM_WORDS = 4  # columns of text; the others are numbers
_NARROW = 100  # columns of a terminal; below, the year is left out
_MOST_STYLED = 200  # rows; rich takes seconds for thousands
_OF_BENCH = {"step_time_median_s": "median_s"}  # in bench.json


def show_table(rows: Sequence[RunRow], num_more: int, console: Console) -> None:
    """Print a line per run. num_more: runs that are left out. A narrow terminal gets fewer figures."""
    titles = ["run", "name", "started", "state", "step", *(METRICS[key].title for key in _COLUMNS)]
    cells = [[*_words(row, console.width < _NARROW), f"{row.step:,}", *(_figure(key, row.results) for key in _COLUMNS)]
             for row in rows]  # fmt: skip
    widths = [max(map(len, column)) for column in zip(titles, *cells)]
    shown = len(titles)
    while shown > _NUM_WORDS + 1 and sum(widths[:shown]) + 2 * (shown - 1) > console.width:
        shown -= 1

    def line(texts: Sequence[str]) -> str:
        padded = [text.rjust(width) if index >= _NUM_WORDS else text.ljust(width)
                  for index, (text, width) in enumerate(zip(texts[:shown], widths))]  # fmt: skip
        return "  ".join(padded).rstrip()

    console.print(Text(line(titles), "dim"), soft_wrap=True)
    if len(rows) > _MOST_STYLED:
        console.file.write("".join(f"{line(texts)}\n" for texts in cells))
    else:
        for row, texts in zip(rows, cells):
            text = Text(line(texts))
            text.highlight_words([row.state], STYLES.get(row.state, ""))
            console.print(text, soft_wrap=True)
    if num_more:
        console.print(f"... {counted(num_more, 'older run')}: --all, or --limit N", markup=False)


def _words(row: RunRow, narrow: bool) -> list[str]:
    return [row.id, "sweep" if row.is_point else row.name, started(row)[5 if narrow else 0 :], row.state]


def started(row: RunRow) -> str:
    """`2026-01-31 12:00`, from the directory's name, in UTC."""
    name = row.name.removeprefix("sweep-") if row.is_point else row.directory.name
    return f"{name[:4]}-{name[4:6]}-{name[6:8]} {name[9:11]}:{name[11:13]}"


def document(row: RunRow) -> dict[str, Any]:
    """Return a row for --json."""
    fields = {"run": row.id, "name": row.name, "directory": row.directory, "started": started(row)}
    return {**fields, "state": row.state, "step": row.step, "error": row.error or None, "results": row.results}


def _size_of(directory: Path) -> int:
    """Return the bytes of all files below a directory."""
    paths = (os.path.join(parent, name) for parent, _, names in os.walk(directory) for name in names)
    return sum(os.lstat(path).st_size for path in paths if os.path.lexists(path))


def facts(run: RunRecord, row: RunRow, console: Console) -> None:
    """Print what a run is and where it came from; its results are in `report.runs.final_panel`."""
    manifest = run.manifest
    versions = [
        f"{key.removeprefix('versions.')} {value}" for key, value in manifest.items() if key.startswith("versions.")
    ]
    git = f"{str(manifest.get('git.sha', '?'))[:12]}{' with changes' if manifest.get('git.dirty') else ''}"
    lines = [
        ("run", str(run.directory)),
        ("state", f"{row.state}, step {row.step:,}{f': {row.error}' if row.error else ''}"),
        ("started", f"{manifest.get('started_utc', '?')} on {', '.join(map(str, manifest.get('hosts') or ['?']))}"),
        ("versions", ", ".join(versions)),
        ("git", git),
        ("seed", str(run.config.get("seed", "?"))),
        ("files", bytes_text(_size_of(run.directory))),
    ]
    if history := attempts.read(run.directory):
        allowed = run.config.get("restarts")
        shown = attempts.lines(history, allowed + 1 if isinstance(allowed, int) and allowed else None, row.step)
        lines.append(("attempts", "\n".join(shown)))
    if not (run.directory / "summary.json").exists():
        lines += [
            (key, metric_text(key, value))
            for key in run.results
            if key != "schema" and (value := run.number(key)) is not None
        ]
    console.print(labelled([(name, Text(text)) for name, text in lines]))
    console.print("started by:")
    print_command(shlex.join(["parallelrun", *map(str, manifest.get("argv") or [])]), console)


def _figure(key: str, results: dict[str, Any]) -> str:
    value = results.get(key, results.get(_OF_BENCH.get(key, "")))
    return metric_text(key, value) if is_number(value) else ""
