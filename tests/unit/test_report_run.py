"""The final panel: drawn from a run's files alone."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console

from parallelrun.report.figures import bytes_text, degrees_text
from parallelrun.report.run import communication_table, show, sparkline


def test_sparkline_goes_from_lowest_to_highest_and_leaves_gaps() -> None:
    assert sparkline([3.0, 2.0, 1.0]) == "█▄▁"
    assert sparkline([1.0, float("nan"), 2.0]) == "▁ █"
    assert sparkline([1.0, 1.0]) == "▁▁"
    assert len(sparkline([float(i) for i in range(500)], width=60)) == 60
    assert sparkline([]) == ""


def test_bytes_and_degrees_are_told_as_on_every_screen() -> None:
    assert [bytes_text(n) for n in (0, 512, 1536, 3 * 2**20)] == ["0 B", "512 B", "1.5 KiB", "3 MiB"]
    assert degrees_text({"dp": 1, "tp": 2, "pp": 4}) == "tp=2 pp=4"
    assert degrees_text({"dp": 1}) == "one rank"


def communication_row(**changed: object) -> dict:
    row = {"rank": 0, "axis": "dp", "operation": "all_reduce", "purpose": "gradients", "calls": 1, "predicted_calls": 1}
    return {**row, "payload_bytes": 2048, "predicted_payload_bytes": 2048, "wire_bytes": 2048, **changed}


def text_of(renderable: object) -> str:
    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(renderable)
    return console.export_text()


def test_a_count_that_was_not_predicted_is_shown() -> None:
    assert "as predicted" in text_of(communication_table([communication_row()]))
    surprising = text_of(communication_table([communication_row(predicted_calls=3)]))
    assert "NOT as predicted" in surprising and "3" in surprising


def test_what_depends_on_the_data_is_held_to_its_bound() -> None:
    within = communication_row(payload_bytes=1500, predicted_most_bytes=4096)
    assert "within the predicted bounds" in text_of(communication_table([within, communication_row(purpose="other")]))
    for wrong in ({"payload_bytes": 5000}, {"calls": 2}):
        told = text_of(communication_table([{**within, **wrong}]))
        assert "NOT as predicted" in told and "predicted  " in told, wrong
    beside = communication_row(purpose="other", payload_bytes=2047)  # another row's bound is none of its business
    assert "NOT as predicted" in text_of(communication_table([within, beside]))


def test_one_rank_that_sends_too_much_is_not_made_up_for_by_another() -> None:
    rows = [communication_row(payload_bytes=1024), communication_row(rank=1, payload_bytes=3072)]
    assert "NOT as predicted" in text_of(communication_table(rows))


def test_the_panel_tells_loss_speed_bytes_and_where_everything_lies(tmp_path: Path) -> None:
    summary = {"model": "gpt", "strategy": "ptdp", "dp": 1, "tp": 2, "pp": 2, "state": "done", "steps": 2, "world": 4}
    summary |= {"global_batch": 48, "parameters": 1234, "step_time_median_s": 0.05, "tokens_per_s": 100.0}
    summary |= {"peak_memory_bytes": 2**20, "ranks_per_core": 2.0}
    summary |= {"compute_s": 0.03, "comm_exposed_s": 0.004, "bubble_s": 0.0155, "data_s": 0.0005}
    summary |= {"bubble_measured": 0.31, "bubble_predicted": 0.25}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    rows = [{"loss": 5.5}, {"loss": 4.25, "val_loss": 4.5}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    (tmp_path / "comm.json").write_text(json.dumps({"rows": [communication_row()]}))
    (tmp_path / "checkpoints" / "step_2").mkdir(parents=True)
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    show(tmp_path, console)
    text = console.export_text()
    for expected in (
        "5.5000",
        "4.2500",
        "4.5000",
        "tp=2 pp=2",
        "50 ms a step",
        str(tmp_path),
        "step_2",
        "as predicted",
        "computing 30 ms, waiting to communicate 4 ms, data 0.5 ms",
        "31% of a step measured (15.5 ms), 25% predicted",
    ):
        assert expected in text, expected
    assert "no scaling measurement: 4 ranks on 2 cores" in text
