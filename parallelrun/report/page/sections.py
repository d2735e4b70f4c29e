"""The sections of a report, as HTML. Every text that comes from a file is escaped."""

from __future__ import annotations

import re
import shlex
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path

from parallelrun.report.figures import bytes_text, seconds_text
from parallelrun.report.page import charts
from parallelrun.report.page.charts import ChartLine
from parallelrun.report.records.find import CONFIG
from parallelrun.report.records.metrics import METRICS, label_of
from parallelrun.report.records.read import expecting, read_object
from parallelrun.report.records.run_differences import Column, RunComparison, spread_of
from parallelrun.report.runs import run_comparison as tables
from parallelrun.report.runs.expert_load import heat_colour
from parallelrun.report.runs.expert_load import read as read_maps
from parallelrun.report.runs.final_panel import sent
from parallelrun.report.sweeps.sweep_rows import read as read_rows
from parallelrun.report.sweeps.sweep_rows import varied

MOST_LINES = 20  # of a chart
_LONGEST = 48  # characters of a run's name
MOST_ROWS = 16  # ranks of a table or a schedule
CURVES = ("loss", "val_loss", "val_top1", "lr", "grad_norm", "tokens_per_s")
PARTS = ("compute_s", "comm_exposed_s", "bubble_s", "data_s")
OVERVIEW = ("loss", "val_loss", "step_time_median_s", "tokens_per_s", "peak_memory_bytes", "wire_bytes_per_step")


def named(columns: Sequence[Column]) -> list[Column]:
    """Return the columns with names: `A gpt-ptdp-tp2pp2 f24f70`, or `A ddp lr=0.1` by what a sweep varied."""
    sweeps = {run.directory.parent: _swept(run.directory.parent) for column in columns for run in column.runs}
    return [replace(column, name=_name(column, sweeps)) for column in columns]


def _swept(sweep: Path) -> dict[str, list[str]]:
    """Directory of a point -> its overrides that are not common to all points, without the groups of their keys."""
    rows = read_rows(sweep)
    return {row.get("directory", ""): [re.sub(r"^(strategy=|[^=]*\.)", "", name) for name in names]
            for row, names in zip(rows, varied(rows))}  # fmt: skip


def _name(column: Column, sweeps: Mapping[Path, Mapping[str, list[str]]]) -> str:
    directory, many = column.runs[0].directory, len(column.runs) > 1
    swept = sweeps[directory.parent].get(directory.name, ())
    name = " ".join(name for name in swept if not (many and name.startswith("seed=")))
    name = name or f"{directory.parent.name} {directory.name.rpartition('-')[2]}"
    name = name if len(name) <= _LONGEST else f"{name[: _LONGEST - 10]}..{name[-8:]}"
    return f"{column.label} {name}" + (f" ({len(column.runs)} seeds)" if many else "")


def grid(titles: Sequence[str], rows: Iterable[Sequence[str]], num_texts: int = 1, label: str = "table") -> str:
    """Return a table; columns after the first `num_texts` are numbers. It scrolls by keyboard where it is too wide."""

    def line(cells: Sequence[str], tag: str) -> str:
        kinds = ("" if index < num_texts else ' class="n"' for index in range(len(cells)))
        return "<tr>" + "".join(f"<{tag}{kind}>{escape(cell)}</{tag}>" for kind, cell in zip(kinds, cells)) + "</tr>"

    body = "".join(line(row, "td") for row in rows)
    head = line(titles, "th")
    frame = f'<div class="wide" tabindex="0" role="region" aria-label="{escape(label)}">'
    return f"{frame}<table><thead>{head}</thead><tbody>{body}</tbody></table></div>"


def overview(columns: Sequence[Column]) -> str:
    """A row per column: state, results."""
    rows = []
    for column in columns:
        head = column.runs[0]
        states = ", ".join(dict.fromkeys(run.state for run in column.runs))
        steps = head.number("steps")
        figures = [tables.spread_text(key, spread_of(column, key)) for key in OVERVIEW]
        rows.append([column.name, states, f"{steps:,.0f}" if steps is not None else "-", *figures])
    return grid(["run", "state", "steps", *(METRICS[key].title for key in OVERVIEW)], rows, 2, "results")


def curves(columns: Sequence[Column]) -> str:
    """Charts over steps. Replicates are one line: their mean, with a band of the standard deviation."""
    shown = columns[:MOST_LINES]
    figures = [charts.line_chart(label_of(key), [_curve(column, key, style) for style, column in enumerate(shown)],
                               from_zero=key == "tokens_per_s") for key in CURVES]  # fmt: skip
    if not any(figures):
        return "<p>No step was recorded.</p>"
    names = [(column.name, style) for style, column in enumerate(shown)]
    keys = charts.legend(names) if len(shown) > 1 else ""
    more = f"<p>{len(columns) - len(shown)} more runs are not drawn.</p>" if len(columns) > len(shown) else ""
    return f'{keys}<div class="charts">{"".join(figures)}</div>{more}'


def _curve(column: Column, key: str, style: int) -> ChartLine:
    of_runs = [{row["step"]: row[key] for row in run.rows if row.get(key) is not None} for run in column.runs]
    steps = sorted(set.intersection(*map(set, of_runs)))
    values = [[of_run[step] for of_run in of_runs] for step in steps]
    points = [(float(step), statistics.fmean(numbers)) for step, numbers in zip(steps, values)]
    deviation = [statistics.stdev(numbers) for numbers in values] if len(of_runs) > 1 else []
    return ChartLine(column.name, style, points, deviation)


def time_by_part(columns: Sequence[Column]) -> str:
    """Bars of the measured parts of a step's time, means over ranks of their medians."""
    rows = []
    for column in columns:
        values = [column.runs[0].number(key) for key in PARTS]
        if any(values):
            rows.append((column.name, [value or 0.0 for value in values]))
    drawn = charts.stacked_bars(
        "measured parts of a step, mean over ranks", rows, [*map(label_of, PARTS)], seconds_text
    )
    crowded = any((run.number("ranks_per_core") or 0) > 1 for column in columns for run in column.runs)
    note = "<p>Ranks shared cores: step times are no scaling measurement.</p>" if crowded else ""
    return drawn + note if drawn else ""


def communication(columns: Sequence[Column]) -> str:
    """Bytes that all ranks send in a step, by axis, operation and purpose; measured beside predicted."""
    parts: list[str] = []
    by_axis: list[tuple[str, dict[str, float]]] = []
    for column in columns:
        path = column.runs[0].directory / "comm.json"
        with expecting(path, "rows"):
            totals = sent(read_object(path).get("rows") or [])
        if not totals:
            continue
        rows = []
        wire: dict[str, float] = {}
        for (axis, *purpose), total in sorted(totals.items()):
            wire[axis] = wire.get(axis, 0.0) + total["wire_bytes"]
            sizes = (bytes_text(total[name]) for name in ("payload_bytes", "predicted_payload_bytes", "wire_bytes"))
            rows.append([axis, *purpose, f"{total['calls']:,}", *sizes, "yes" if total["as predicted"] else "no"])
        by_axis.append((column.name, wire))
        titles = ["axis", "operation", "purpose", "calls", "payload", "predicted", "wire", "as predicted"]
        table = grid(titles, rows, 3, f"communication of {column.name}")
        parts.append(f"<details{' open' if len(columns) == 1 else ''}><summary>{escape(column.name)}</summary>"
                     f"{table}</details>")  # fmt: skip
    axes = [*dict.fromkeys(axis for _, wire in by_axis for axis in wire)]
    bars = [(name, [wire.get(axis, 0.0) for axis in axes]) for name, wire in by_axis]
    return charts.stacked_bars("bytes sent in one step by all ranks, by axis", bars, axes, bytes_text) + "".join(parts)


def experts(columns: Sequence[Column]) -> str:
    """Heat maps of the load of experts over the steps."""
    parts = []
    for column in columns:
        path = column.runs[0].directory
        with expecting(path / "routing.jsonl"):
            maps = read_maps(path, columns=60)
        if maps is None:
            continue
        drawn = [charts.heat_map(layer.layer, [["" if cell is None else heat_colour(cell) for cell in row]
                                             for row in layer.cells], layer.row_labels, maps.first, maps.last)
                 for layer in maps.layers]  # fmt: skip
        parts.append(f"<h3>{escape(column.name)}</h3><div class='charts'>{''.join(drawn)}</div>")
    note = "Load of each expert (rows) over the mean load of its layer, by step: blue is below the mean, "
    note += "pale is balanced, red is twice the mean or more."
    return f"{''.join(parts)}<p class='quiet'>{note}</p>" if parts else ""


def memory(columns: Sequence[Column]) -> str:
    """Memory of a rank: the predicted parts of each pp rank, and the measured peak of the largest rank."""
    kinds = ("weights", "gradients", "optimizer", "activations", "temporary")
    bars, rows = [], []
    for column in columns:
        run = column.runs[0]
        positions = run.plan.get("memory.per_position")
        if not isinstance(positions, list) or not positions:
            continue
        with expecting(run.directory / "plan.json", "memory.per_position"):
            heaviest = max(positions, key=lambda position: position["total"])
            bars.append((column.name, [float(heaviest.get(kind, 0)) for kind in kinds]))
            predicted = float(heaviest["total"])
        measured = run.number("peak_memory_bytes")
        rows.append([column.name, bytes_text(predicted), bytes_text(measured) if measured is not None else "-"])
    if not bars:
        return ""
    drawn = charts.stacked_bars("predicted memory of the largest rank", bars, kinds, bytes_text)
    table = grid(["run", "predicted", "measured peak"], rows, 1, "memory")
    on_cpu = any(column.runs[0].results.get("device") == "cpu" for column in columns)
    note = "On CPU the peak is all memory of the process, with Python and torch, which the prediction leaves out."
    return drawn + table + (f"<p>{note}</p>" if on_cpu else "")


def differences(comparison: RunComparison) -> str:
    """Return the table of differences and the first step at which the losses differ, as HTML."""
    parts = []
    few = len(comparison.columns) <= tables.MOST_COLUMNS
    titles = ["key", *(column.label for column in comparison.columns)] if few else ["key", "value", "runs"]
    for section, title in tables.SECTIONS:
        rows = tables.differing(comparison, section)
        cells: list[Sequence[str]] = [[row.key, *map(tables.value_text, row.values)] for row in rows]
        if not few:
            cells = [line for row in rows for line in tables.by_value(row, comparison.columns)]
        if cells:
            parts.append(f"<h3>{title}</h3>{grid(titles, cells, len(titles), title)}")
    lines = [*tables.losses(comparison), *tables.notes(comparison)]
    return "".join(parts) + "".join(f"<p>{escape(line)}</p>" for line in lines)


def configuration(columns: Sequence[Column]) -> str:
    """Command, versions and config.yaml of every run."""
    parts = []
    for column in columns:
        for run in column.runs:
            command = shlex.join(["parallelrun", *map(str, run.manifest.get("argv") or [])])
            facts = [key for key in run.manifest if key not in ("argv", "overrides")]
            rows = [[key, tables.value_text(run.manifest[key])] for key in facts]
            try:
                text = (run.directory / CONFIG).read_text(encoding="utf-8")
            except (OSError, ValueError):
                text = "no config.yaml"
            parts.append(
                f"<details><summary>{escape(f'{column.label} {run.directory.name}')}: {escape(command)}</summary>"
                f"{grid(['manifest', 'value'], rows, 2, 'manifest')}"
                f'<pre tabindex="0" role="region" aria-label="config.yaml">{escape(text)}</pre></details>'
            )
    return "".join(parts)
