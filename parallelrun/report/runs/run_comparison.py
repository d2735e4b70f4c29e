"""A comparison of runs as tables on the screen, as Markdown, and as a JSON document."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from parallelrun.base.wording import counted
from parallelrun.report.records import run_differences
from parallelrun.report.records.metrics import METRICS, metric_text
from parallelrun.report.records.run_differences import Column, KeyDifference, RunComparison
from parallelrun.report.screen import NO_LIMIT, table

MOST_COLUMNS = 4  # beside each other on the screen; more runs are compared below each other
MOST_KEYS = 24  # of a section on the screen
LONGEST = 28  # characters of a value on the screen
SECTIONS = (("config", "configuration"), ("plan", "plan"), ("versions", "versions"))
_NONE = "-"
_HASH = re.compile("[0-9a-f]{40,64}")


def show(comparison: RunComparison, failed: Sequence[str], console: Console) -> None:
    """Print the comparison. failed: the texts of the conditions that failed."""
    for line in _heads(comparison):
        console.print(line, markup=False, soft_wrap=True)
    for name, title in SECTIONS:
        rows = differing(comparison, name)
        if rows:
            console.print()
            console.print(_differences(title, rows[:MOST_KEYS], comparison.columns))
        left_out = [row.key for row in getattr(comparison, name) if row not in rows[:MOST_KEYS]]
        if left_out:
            more = f" and {len(left_out) - 6} more" if len(left_out) > 6 else ""
            console.print(f"also different, in --json: {', '.join(left_out[:6])}{more}", style="dim")
    console.print()
    for drawn in _results(comparison, console.width):
        console.print(drawn)
        console.print()
    for line in (*losses(comparison), *notes(comparison), *(f"FAILED {text}" for text in failed)):
        console.print(line, markup=False)


def markdown(comparison: RunComparison, failed: Sequence[str]) -> str:
    """Return the comparison as Markdown, in full."""
    labels = [column.label for column in comparison.columns]
    parts = ["## Comparison of runs", "\n".join(f"- {line}" for line in _heads(comparison))]
    for name, title in SECTIONS:
        rows = getattr(comparison, name)
        if rows:
            cells = ([row.key, *map(value_text, row.values)] for row in rows)
            parts.append(f"### Differences in the {title}\n\n" + _grid(["key", *labels], cells))
    parts.append("### Results\n\n" + _grid(["result", *_result_titles(comparison)], _result_rows(comparison)))
    lines = [*losses(comparison), *notes(comparison), *(f"**FAILED** `{text}`" for text in failed)]
    return "\n\n".join([*parts, "\n".join(f"- {line}" for line in lines)]) + "\n"


def document(comparison: RunComparison, failed: Sequence[str]) -> dict[str, Any]:
    """Return the comparison as a JSON object; non-finite numbers become null when it is written."""

    def values(row: KeyDifference) -> dict[str, Any]:
        pairs = zip(comparison.columns, row.values)
        return {column.label: value for column, value in pairs if value is not run_differences.MISSING}

    def by_column(spreads: Iterable[Any]) -> dict[str, Any]:
        return {column.label: spread for column, spread in zip(comparison.columns, spreads)}

    return {
        "columns": [
            {"label": column.label, "state": [run.state for run in column.runs], "seeds": column.seeds,
             "directories": [run.directory for run in column.runs]} for column in comparison.columns
        ],
        **{name: {row.key: values(row) for row in getattr(comparison, name)} for name, _ in SECTIONS},
        "measures": {
            row.key: {"values": by_column(row.values), "changes": by_column(row.changes)} for row in comparison.measures
        },
        "over_seeds": comparison.over_seeds,
        "losses": comparison.losses,
        "failed": list(failed),
    }  # fmt: skip


def notes(comparison: RunComparison) -> list[str]:
    """Return what a reader of the figures must know."""
    notes_on_runs = []
    runs = [run for column in comparison.columns for run in column.runs]
    replicated = any(len(column.runs) > 1 for column in comparison.columns)
    if comparison.over_seeds:
        notes_on_runs.append(f"only the seed differs: `all` is mean ± standard deviation over {len(runs)} seeds")
    elif replicated:
        notes_on_runs.append("± is the standard deviation over seeds")
    if any((run.number("ranks_per_core") or 0) > 1 for run in runs):
        notes_on_runs.append("ranks shared cores: step times are no scaling measurement")
    unfinished = [str(run.directory) for run in runs if run.state != "done"]
    if unfinished:
        notes_on_runs.append(f"not finished: {', '.join(unfinished[:4])}{' ...' if len(unfinished) > 4 else ''}")
    return notes_on_runs


def _heads(comparison: RunComparison) -> list[str]:
    """`A  runs/gpt-.../...: done, 8 steps`, a line per column."""
    lines = []
    for column in comparison.columns:
        head = column.runs[0]
        steps = head.number("steps")
        text = f"{column.label}  {_path(head.directory)}: {head.state}"
        text += f", {counted(round(steps), 'step')}" if steps else ""
        if len(column.runs) > 1:
            text += f"; {len(column.runs)} runs with seeds {', '.join(map(str, column.seeds))}"
        lines.append(text)
    return lines


def differing(comparison: RunComparison, section: str) -> list[KeyDifference]:
    """Return the differences of `config`, `plan` or `versions`, without tables, which no cell can hold."""
    return [row for row in getattr(comparison, section) if not any(map(_is_table, row.values))]


def _path(directory: Path) -> str:
    """The path from the working directory where that is shorter."""
    try:
        return str(directory.relative_to(Path.cwd()))
    except ValueError:
        return str(directory)


def _differences(title: str, rows: Sequence[KeyDifference], columns: Sequence[Column]) -> Table:
    if len(columns) <= MOST_COLUMNS:
        drawn = table(title, *(column.label for column in columns), rule=False, padding=(0, 2, 0, 0))
        for row in rows:
            drawn.add_row(row.key, *(value_text(value)[:LONGEST] for value in row.values))
        return drawn
    drawn = table(title, "value", "runs", rule=False, padding=(0, 2, 0, 0))
    for row in rows:
        for key, value, labels in by_value(row, columns):
            drawn.add_row(key, value[:LONGEST], labels)
    return drawn


def by_value(row: KeyDifference, columns: Sequence[Column]) -> list[tuple[str, str, str]]:
    """Return (key, value, labels of the runs that have it) for each value; the key in the first one only."""
    alike: dict[str, list[str]] = {}
    for column, value in zip(columns, row.values):
        alike.setdefault(value_text(value), []).append(column.label)
    return [("" if index else row.key, value, " ".join(labels)) for index, (value, labels) in enumerate(alike.items())]


def value_text(value: Any) -> str:
    """Return a value of a configuration or manifest, short."""
    if value is run_differences.MISSING:
        return _NONE
    if _is_table(value):
        return f"[{counted(len(value), 'row')}]"
    if isinstance(value, str) and _HASH.fullmatch(value):
        return value[:12]
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _results(comparison: RunComparison, width: int) -> list[Table]:
    """A row per result; where there are many runs or the terminal is narrow, tables with a row per run."""
    rows = _result_rows(comparison)
    titles = _result_titles(comparison)
    wide = _results_table([["results", *titles], *rows])
    if len(titles) <= MOST_COLUMNS and _width(wide) <= width:
        return [wide]
    columns = [["results", *titles], *rows]
    tables, first = [], 1
    while first < len(columns):
        last = len(columns)
        while _width(drawn := _results_table([*zip(*(columns[0], *columns[first:last]))])) > width and last > first + 1:
            last -= 1
        tables.append(drawn)
        first = last
    return tables


def _results_table(lines: Sequence[Sequence[str]]) -> Table:
    titles = [lines[0][0], *(f">{title}" for title in lines[0][1:])]
    drawn = table(*titles, rule=False, padding=(0, 2, 0, 0))
    for line in lines[1:]:
        drawn.add_row(*line)
    return drawn


def _width(drawn: Table) -> int:
    return Console(width=NO_LIMIT).measure(drawn).maximum


def _result_titles(comparison: RunComparison) -> list[str]:
    return [*(column.label for column in comparison.columns), *(["all"] if comparison.over_seeds else [])]


def _result_rows(comparison: RunComparison) -> list[list[str]]:
    """The title of a result, then its value in each column with the change from the first one."""
    by_key = {row.key: row for row in comparison.measures}
    rows = []
    for key, metric in METRICS.items():
        if key not in by_key or all(spread is None or spread.mean == 0 for spread in by_key[key].values):
            continue
        cells = [spread_text(key, value) for value in by_key[key].values]
        changes = [_change(change) if index else "" for index, change in enumerate(by_key[key].changes)]
        together = [spread_text(key, comparison.over_seeds.get(key))] if comparison.over_seeds else []
        rows.append([metric.label, *(f"{cell}{change}" for cell, change in zip(cells, changes)), *together])
    return rows


def spread_text(key: str, spread: run_differences.Spread | None) -> str:
    """Return `4.42 ±0.01`, or `-` for a result that was not recorded."""
    if spread is None:
        return _NONE
    if spread.deviation is None:
        return metric_text(key, spread.mean)
    deviation = float(f"{spread.deviation:.2g}")  # more digits say nothing
    return f"{metric_text(key, spread.mean)} ±{metric_text(key, deviation) if deviation else 0}"


def _change(change: float | None) -> str:
    if change is None or math.isinf(change):
        return ""
    return " (=)" if change == 0 else f" ({change:+.1%})" if abs(change) < 10 else f" (x{change + 1:.3g})"


def losses(comparison: RunComparison) -> list[str]:
    """Return a line per column but the first: where its losses part from the first one's."""
    base = comparison.columns[0]
    pairs = zip(comparison.columns[1:], comparison.losses)
    trained = [
        difference for column, difference in pairs if any(run.rows for run in (*base.runs, *column.runs))
    ]  # not bench, verify
    return [loss_text(base.label, difference) for difference in trained]


def loss_text(base: str, gap: run_differences.LossDifference) -> str:
    """Say where the losses of a run part from those of the run `base`, and by how much."""
    pair = f"losses of {base} and {gap.label}"
    if not gap.num_common:
        return f"{pair}: no step in common"
    steps = f"{counted(gap.num_common, 'common step')}"
    if gap.first_step is None:
        return f"{pair}: bitwise equal in {steps}"
    finite = math.isfinite(gap.first)
    first = f"by {gap.first:+.3g} (relative {gap.first_relative:+.1e})" if finite else "because one is not finite"
    return (
        f"{pair}: part at step {gap.first_step}, {first}; at most {gap.largest:+.3g} at step {gap.largest_step}; "
        f"{gap.last:+.3g} at step {gap.last_step}, the last of {steps}"
    )


def _grid(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown. A bar or a line break in a cell would end it."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) + " |"
                     for line in lines)  # fmt: skip
