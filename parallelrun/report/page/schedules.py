"""The section of a report on pipeline schedules: the predicted Gantt chart, and the measured one below it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from parallelrun.base.errors import ConfigError
from parallelrun.base.wording import counted
from parallelrun.config.keys import named_code
from parallelrun.report.figures import evenly, seconds_text
from parallelrun.report.page import charts
from parallelrun.report.page.charts import GanttCell
from parallelrun.report.page.sections import MOST_ROWS
from parallelrun.report.records.find import CONFIG
from parallelrun.report.records.read import RunRecord, broken, expecting, read_object
from parallelrun.report.records.run_differences import Column

MEASURED = "schedule.json"  # written by train.recorder
MOST_PIPELINES = 4  # runs whose schedules are drawn
MOST_CELLS = 3000  # actions of a schedule
ACTIONS = {"F": 0, "B": 1, "I": 2, "W": 3}
ACTION_NAMES = ("forward", "backward", "input gradient", "weight gradient")


def pipeline(columns: Sequence[Column]) -> str:
    """The schedules of runs with pipeline stages, predicted and measured, and the bubble of both."""
    with_stages = [column for column in columns if (column.runs[0].config.get("pp") or 1) > 1]
    parts = []
    for column in with_stages[:MOST_PIPELINES]:
        run = column.runs[0]
        parts.append(f"<h3>{escape(column.name)}</h3>{_predicted(run)}{_measured(run)}")
        measured, predicted = run.number("bubble_measured"), run.number("bubble_predicted")
        if predicted is not None:
            text = f"Idle share of a step: {predicted:.1%} predicted"
            text += f", {measured:.1%} measured (mean over ranks)" if measured is not None else ", not measured"
            parts.append(f"<p>{text}.</p>")
    if len(with_stages) > MOST_PIPELINES:
        parts.append(f"<p>{len(with_stages) - MOST_PIPELINES} more runs with a pipeline are not drawn.</p>")
    return "".join(parts)


def _predicted(run: RunRecord) -> str:
    from parallelrun.planner.predict import simulate
    from parallelrun.planner.resolve.freeze import load_frozen
    from parallelrun.planner.resolve.resolve_config import resolve

    try:
        config = load_frozen((run.directory / CONFIG).read_text(encoding="utf-8"))
        if code := named_code(config):  # which a stranger's run directory may name
            called = escape(", ".join(code.values()))
            return f"<p>The predicted schedule is not drawn: planning would call the run's code {called}.</p>"
        plan = resolve(config)
    except ConfigError as error:  # of another version
        return f"<p>The predicted schedule cannot be drawn: {escape(error.problems[0].what)}.</p>"
    except (OSError, ValueError) as error:
        raise broken(run.directory / CONFIG, str(error)) from error
    schedule = simulate.of_plan(plan)
    cells = [
        GanttCell(row, ACTIONS[event.kind], event.begin, event.end, str(event.microbatch))
        for row, pp_rank in enumerate(evenly(len(schedule.orders), MOST_ROWS))
        for event in schedule.events(pp_rank)
    ]
    title = f"predicted schedule, {schedule.num_microbatches} of {counted(plan.batch.microbatches, 'microbatch', 'es')}"
    return _drawn(title, cells, "Times follow each stage's FLOPs; messages take no time.")


def _measured(run: RunRecord) -> str:
    path = run.directory / MEASURED
    document = read_object(path)
    if not document:
        return "<p>The run recorded no times of single actions: it had not finished.</p>"
    with expecting(path, "ranks"):
        ranks = document["ranks"]
        cells = [
            GanttCell(row, ACTIONS[action["kind"]], action["begin_s"], action["end_s"], str(action["microbatch"]))
            for row, index in enumerate(evenly(len(ranks), MOST_ROWS))
            for action in ranks[index]["actions"]
        ]
        length = max(cell.end for cell in cells)
        title = f"measured schedule of step {int(document['step'])}, {seconds_text(length)}"
    note = "The first data and tensor replica. An action begins when its input has arrived; it holds the waiting of "
    return _drawn(title, cells, note + "its own collectives.")


def _drawn(title: str, cells: Sequence[GanttCell], note: str) -> str:
    if not cells or len(cells) > MOST_CELLS:
        return f"<p>The {escape(title)} is not drawn: {counted(len(cells), 'action')}.</p>"
    return charts.gantt(title, cells, ACTION_NAMES) + f"<p class='quiet'>{note}</p>"
