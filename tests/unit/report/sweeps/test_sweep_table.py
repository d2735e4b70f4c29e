"""The sweep's table on wide and narrow screens."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from parallelrun.report.sweeps import sweep_table


@pytest.fixture
def directory(tmp_path):
    rows = [
        {
            "point": number, "state": "done", "overrides": [f"strategy={name}"], "config_sha256": str(number),
            "world": 4, "loss": 4.26614, "val_loss": 4.09703, "step_time_median_s": 0.86191, "tokens_per_s": 3564.2,
            "wire_bytes_per_step": 10_091_520,
        }
        for number, name in enumerate(["ddp", "horovod"])
    ]  # fmt: skip
    (tmp_path / sweep_table.RESULTS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_a_file_gets_every_column_whole(directory, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    sweep_table.show(directory)
    text = capsys.readouterr().out
    assert "…" not in text and "sent a step" in text and "9.62 MiB" in text


def test_a_narrow_terminal_gets_fewer_columns_and_is_told_which_are_left_out(directory, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    sweep_table.show(directory)
    text = capsys.readouterr().out
    assert "…" not in text and "terminal is narrow: loss" in text and "4.097" in text


PLANNED = {"state": "planned", "world": 8, "fits": "yes", "memory_bytes": 2**34, "bubble_predicted": 0.125,
           "wire_bytes_per_step": 2**40, "samples_per_s": 0.5}  # fmt: skip


def table_of_plans(*rows: dict[str, object], width: int = 120) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    points = [{"point": i, "overrides": [f"micro_batch={i + 1}"], **PLANNED, **row} for i, row in enumerate(rows)]
    sweep_table.show_table(points, console)
    return console.file.getvalue().splitlines()


def test_the_table_of_plans_has_the_changed_keys_and_what_decides_between_plans():
    rows = [{"step_time_predicted_s": 2.0, "tokens_per_s": 2048.0}, {"step_time_predicted_s": 4.0, "tokens_per_s": 1e3}]
    _, head, first, _ = table_of_plans(*rows)
    titles = ["#", "micro_batch", "state", "world", "degrees", "fits", "memory", "step", "time", "tokens/s", "bubble"]
    assert head.split() == [*titles, "sent", "a", "step"]
    assert first.split() == ["0", "1", "planned", "8", "yes", "16", "GiB", "2", "s", "2,048", "12%", "1", "TiB"]


def test_a_step_time_that_is_a_bound_is_marked_and_no_other():
    rows = [{"step_time_predicted_s": 2.0}, {"step_time_predicted_s": 3.0, "step_time_is_bound": True}]
    _, _, first, second, note = table_of_plans(*rows)
    assert "*" not in first and " 3 s*" in second and "0.5*" in second and note.startswith("* not predicted")
    assert "12%*" not in second and "TiB*" not in second


MEASURED = {"state": "done", "world": 4, "pp": 4, "dp": 1, "loss": 4.1, "ranks_per_core": 2.0}
POINTS = {"naive": (0.192, 0.75, 0.4), "gpipe": (0.325, 0.22, 0.2), "1f1b": (0.18, 0.22, 0.1)}


def table_of_runs(**changes: object) -> tuple[list[str], list[str]]:
    """The strategies in the order of the table, and its other lines."""
    rows = [{**MEASURED, "point": point, "overrides": [f"strategy={name}"], "step_time_median_s": measured,
             "bubble_predicted": bubble, "predicted.step_s": predicted, **changes}
            for point, (name, (measured, bubble, predicted)) in enumerate(POINTS.items())]  # fmt: skip
    console = Console(file=io.StringIO(), width=120)
    sweep_table.show_table(rows, console)
    lines = console.file.getvalue().splitlines()
    return [line.split()[1] for line in lines[2:5]], [lines[1], *lines[5:]]


def test_where_ranks_share_cores_the_prediction_orders_the_points():
    order, (head, note) = table_of_runs(**{"predicted.step_s": None})
    assert order == ["gpipe", "1f1b", "naive"] and "predicted bubble" in head
    assert note == (
        "step time is no scaling measurement: ranks shared cores; the points are ordered by their predicted bubble"
    )
    order, (head, note) = table_of_runs()
    assert order == ["1f1b", "gpipe", "naive"] and note.endswith("ordered by their predicted step time")
    order, lines = table_of_runs(ranks_per_core=1.0)
    assert order == [*POINTS] and len(lines) == 1
    order, (head, note) = table_of_runs(**{"predicted.step_s": None, "bubble_predicted": 0.0})
    assert order == [*POINTS] and "bubble" not in head and note.endswith("ranks shared cores")
