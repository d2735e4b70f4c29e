"""The table of metrics: units of numbers, and one name of a metric on every screen and page."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from parallelrun.report.page import sections
from parallelrun.report.records.metrics import METRICS, Metric, label_of, metric_text, unit_of
from parallelrun.report.records.read import RunRecord
from parallelrun.report.records.rows import RunRow
from parallelrun.report.records.run_differences import columns_of, compare
from parallelrun.report.runs import final_panel, run_comparison, run_list
from parallelrun.report.sweeps import sweep_picture, sweep_table


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("loss", 4.266141, "4.26614"),
        ("tokens_per_s", 3564.2, "3,564"),
        ("tokens_per_s", 12.345, "12.3"),
        ("step_time_median_s", 0.0861, "86.1 ms"),
        ("predicted.step_s", 1130.0, "1130 s"),
        ("peak_memory_bytes", 3 * 2**29, "1.5 GiB"),
        ("bubble_predicted", 0.274, "27%"),
        ("training_days", 12.34, "12.3"),
        ("tokens", 7.0, "7"),
        ("restart_lost_s", 2.5, "2.5 s"),  # not in the table: the key names the unit
        ("payload_bytes", 2048.0, "2 KiB"),
    ],
)
def test_a_number_is_written_with_its_unit(key, value, text):
    assert metric_text(key, value) == text


def test_ticks_get_more_digits():
    assert metric_text("efficiency", 0.98765, 5) == "98.77%"
    assert metric_text("step_time_median_s", 0.123456, 5) == "123.46 ms"


def test_a_result_outside_the_table_keeps_its_key():
    assert label_of("model_flops_per_s") == "model_flops_per_s" and unit_of("model_flops_per_s") == "rate"


def test_every_screen_takes_its_keys_from_the_table():
    lists = [
        sections.CURVES, sections.PARTS, sections.OVERVIEW, run_list._COLUMNS, sweep_table._COLUMNS,
        sweep_table._COLUMNS_OF_PLANS, sweep_picture.MEASURES, final_panel.PARTS,
    ]  # fmt: skip
    assert {key for keys in lists for key in keys} <= set(METRICS)


def test_a_metric_has_one_name_on_every_screen(monkeypatch):
    """A new name in the table reaches all of them."""
    monkeypatch.setitem(METRICS, "tokens_per_s", Metric("words/s"))
    results = {"tokens_per_s": 120.0, "loss": 2.0}
    runs = [RunRecord(Path(name), "done", {"seed": 1, "dp": n}, {}, {}, results, ({"step": 1, "tokens_per_s": 1.0},))
            for n, name in enumerate("ab")]  # fmt: skip
    console = Console(file=io.StringIO(), width=200)
    run_list.show_table([RunRow(Path("runs/gpt/20260101T000000Z-a"), "done", 1, "", results)], 0, console)
    sweep_table.show_table([{"point": 0, "state": "done", **results}], console)
    screens = console.file.getvalue()
    columns = columns_of(runs)
    pages = [run_comparison.markdown(compare(runs), []), sections.overview(columns), sections.curves(columns)]
    assert screens.count("words/s") == 2 and all("words/s" in page for page in pages)
    assert not any("tokens/s" in text for text in [screens, *pages])
