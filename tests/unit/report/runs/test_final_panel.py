"""The final panel: drawn from a run's files alone."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from parallelrun.report.plans import predicted
from parallelrun.report.progress import ProgressLine
from parallelrun.report.runs import bench, verify
from parallelrun.report.runs.final_panel import communication_table, show, sparkline
from parallelrun.report.screen import open_console


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal of 80 columns, as rich sees it."""
    for name, value in (("COLUMNS", "80"), ("FORCE_COLOR", "1"), ("TERM", "xterm"), ("NO_COLOR", "1")):
        monkeypatch.setenv(name, value)


def progress_row(step: int, **more: float) -> dict:
    row = {"step": step, "loss": 2.97694, "grad_norm": 1.0341, "lr": 3e-4, "tokens_per_s": 16324.2, "tokens": 48 * 64}
    return {**row, "samples": 48, **more}


def drawn(capsys: pytest.CaptureFixture[str], rows: list[dict]) -> list[str]:
    """The lines that these rows are shown as; of a redrawn line every drawing."""
    progress = ProgressLine(60000, enabled=True)
    for row in rows:
        progress.update(row)
    progress.close()
    return [line for line in re.split(r"[\r\n]", plain(capsys.readouterr().out)) if line.strip()]


def plain(screen: str) -> str:
    """Without the codes of colours."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen)


def test_the_progress_line_fits_80_columns_and_keeps_what_matters(terminal, capsys) -> None:
    rows = [progress_row(59999, val_loss=2.5, val_top1=0.5, max_vio=1.5, staleness=3), progress_row(60000)]
    lines = drawn(capsys, rows)
    assert len(lines) == 2 and "val_loss 2.5000" in lines[0]
    for line in lines:
        assert len(line) < 80 and "loss 2.9769" in line and "16,324 tokens/s" in line and "━━━━" in line


def test_a_stale_evaluation_is_never_shown_as_that_of_a_later_step(terminal, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    rows = [progress_row(10, val_loss=2.5), progress_row(11)]
    fresh, stale = drawn(capsys, rows)
    assert "val_loss 2.5000  " in fresh and "val_loss 2.5000 (step 10)  " in stale
    monkeypatch.delenv("FORCE_COLOR")
    monkeypatch.setattr("parallelrun.report.progress.PLAIN_LINE_EVERY_S", -1.0)
    fresh, stale = drawn(capsys, rows)
    assert "val_loss 2.5000" in fresh and "val_loss" not in stale


def test_a_pipe_gets_whole_lines_without_frames(monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    finished_run(tmp_path)
    show(tmp_path)
    text = capsys.readouterr().out
    assert "│" not in text and "╭" not in text
    assert "computing 30 ms, waiting to communicate 4 ms, data 0.5 ms" in text
    assert f"\nrun       {tmp_path}\n" in text and " \n" not in text


def test_the_panel_fits_80_columns(terminal, capsys, tmp_path) -> None:
    finished_run(tmp_path, steps=200)
    show(tmp_path)
    lines = plain(capsys.readouterr().out).splitlines()
    *panel, checkpoint = lines
    assert max(map(len, panel)) <= 80 and "…" not in "".join(lines)
    assert checkpoint.startswith("last checkpoint step_2: ")  # no frame around what is copied
    losses = next(line for line in lines if "│ loss" in line)
    assert losses.rstrip(" │").endswith("4.2500")


def test_asynchronous_workers_staleness_is_shown(capsys, tmp_path) -> None:
    facts = {"staleness_mean": 0.97, "staleness_max": 3, "clock_gap_max": 1, "staleness_bound": 4,
             "dropped_gradients": 2}  # fmt: skip
    finished_run(tmp_path, **facts)
    show(tmp_path)
    said = "staleness 0.97 updates on average, at most 3 updates; workers at most 1 step apart (bound 4); 2 gradients"
    assert said in capsys.readouterr().out
    finished_run(tmp_path, staleness_mean=None)
    show(tmp_path)
    assert "staleness" not in capsys.readouterr().out


def test_sparkline_goes_from_lowest_to_highest_and_leaves_gaps() -> None:
    assert sparkline([3.0, 2.0, 1.0]) == "█▄▁"
    assert sparkline([1.0, float("nan"), 2.0]) == "▁ █"
    assert sparkline([1.0, 1.0]) == "▁▁"
    assert sparkline([4.381, 4.3810001, 4.381]) == "▁▁▁"  # equal within rounding
    assert len(sparkline([float(i) for i in range(500)], width=60)) == 60
    assert sparkline([]) == ""


def communication_row(**changed: object) -> dict:
    row = {"rank": 0, "axis": "dp", "operation": "all_reduce", "purpose": "gradients", "calls": 1, "predicted_calls": 1}
    return {**row, "payload_bytes": 2048, "predicted_payload_bytes": 2048, "wire_bytes": 2048, **changed}


def text_of(renderable: object) -> str:
    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(renderable)
    return console.export_text()


WITHIN = {"payload_bytes": 1500, "predicted_most_bytes": 4096}
OTHER = {"purpose": "other"}
COUNTED = [  # rows, and the verdict
    ([{}], "as predicted"),
    ([{"predicted_calls": 3}], "NOT as predicted"),
    ([WITHIN, OTHER], "within the predicted bounds"),
    ([{**WITHIN, "payload_bytes": 5000}], "NOT as predicted"),
    ([{**WITHIN, "calls": 2}], "NOT as predicted"),
    ([WITHIN, {**OTHER, "payload_bytes": 2047}], "NOT as predicted"),  # another row's bound is none of its business
    ([{"payload_bytes": 1024}, {"rank": 1, "payload_bytes": 3072}], "NOT as predicted"),  # ranks that make up for it
]


@pytest.mark.parametrize(("changes", "verdict"), COUNTED)
def test_what_was_counted_is_held_to_the_prediction(changes, verdict) -> None:
    told = text_of(communication_table([communication_row(**changed) for changed in changes]))
    assert verdict in told and ("NOT" in told) == ("predicted  " in told) == verdict.startswith("NOT"), told
    assert "predicted_calls" not in changes[0] or re.search(r"predicted +3 ", told), told


def finished_run(directory: Path, steps: int = 2, **more: object) -> None:
    """The files of a run that `show` reads. more: of its summary."""
    summary = {"model": "gpt", "strategy": "ptdp", "dp": 1, "tp": 2, "pp": 2, "state": "done", "steps": steps}
    summary |= {"world": 4, "global_batch": 48, "parameters": 1234, "step_time_median_s": 0.05, "tokens_per_s": 100.0}
    summary |= {"peak_memory_bytes": 2**20, "ranks_per_core": 2.0}
    summary |= {"compute_s": 0.03, "comm_exposed_s": 0.004, "bubble_s": 0.0155, "data_s": 0.0005}
    summary |= {"bubble_measured": 0.31, "bubble_predicted": 0.25}
    (directory / "summary.json").write_text(json.dumps({**summary, **more}))
    rows = [*({"loss": 5.5} for _ in range(steps - 1)), {"loss": 4.25, "val_loss": 4.5}]
    (directory / "metrics.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    (directory / "comm.json").write_text(json.dumps({"rows": [communication_row()]}))
    (directory / "checkpoints" / "step_2").mkdir(parents=True, exist_ok=True)


def test_the_panels_resume_can_be_pasted_into_a_shell(tmp_path: Path) -> None:
    directory = tmp_path / "with a space"
    directory.mkdir()
    finished_run(directory)
    console = Console(width=200, record=True, file=io.StringIO())
    show(directory, console)
    assert f"last checkpoint step_2: 'resume={directory}'" in console.export_text()


def test_the_panel_tells_loss_speed_bytes_and_where_everything_lies(tmp_path: Path) -> None:
    finished_run(tmp_path)
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    show(tmp_path, console)
    text = console.export_text()
    for expected in (
        "5.5000", "4.2500", "4.5000", "tp=2 pp=2", "50 ms a step", str(tmp_path), "step_2", "as predicted",
        "computing 30 ms, waiting to communicate 4 ms, data 0.5 ms", "31% of a step measured (15.5 ms), 25% predicted",
    ):  # fmt: skip
        assert expected in text, expected
    assert "no scaling measurement: 4 ranks on 2 cores" in text


def test_messages_are_counted_at_their_senders(capsys):
    row = {"axis": "pp", "purpose": "activations", "calls": 3, "predicted_calls": 3, "payload_bytes": 1024,
           "predicted_payload_bytes": 1024, "wire_bytes": 2048}  # fmt: skip
    received = {**row, "operation": "recv", "payload_bytes": 0, "predicted_payload_bytes": 0, "wire_bytes": 0}
    open_console().print(communication_table([{**row, "operation": "send"}, received, {**row, "operation": "send"}]))
    _, _, line = capsys.readouterr().out.splitlines()
    assert line.split() == ["pp", "send", "activations", "6", "2", "KiB", "4", "KiB"]


def test_the_prediction_is_compared_with_what_was_measured():
    known = {"step_s": 0.1, "p10_s": 0.08, "p90_s": 0.12, "compares_parts": False, "explanation": None}
    assert predicted.text(known, 0.15) == "100 ms a step (80 ms to 120 ms): measured is 50% longer"
    assert predicted.text(known, 0.05) == "100 ms a step (80 ms to 120 ms): measured is 50% shorter"


def test_an_error_above_the_bound_is_marked(capsys):
    errors = {"loss": 1e-11, "grads": 2e-10, "params": None}
    verify.show({
        "preset": "ddp", "degrees": {"dp": 2}, "against": "one device", "precision": "fp64", "max_error": errors,
        "tolerance": 1e-10, "worst": dict.fromkeys(errors, "wte"), "reports_only": False, "copies_that_disagree": [],
        "routing_held": False, "parameters_compared": 3, "steps": 2, "passed": False, "equivalence": "exact",
        "equivalence_detail": "",
    })  # fmt: skip
    lines = capsys.readouterr().out.splitlines()
    marks = [line.split()[-1] for line in lines if "wte" in line]
    assert marks == ["equal", "DIFFERS", "DIFFERS"] and lines[-1] == "NOT EQUAL: exact, 3 parameters, 2 steps"


def test_a_benchmark_shows_each_of_its_figures(capsys):
    seconds = {"median_s": 0.2, "lower_quartile_s": 0.1, "upper_quartile_s": 0.3, "min_s": 0.05, "p95_s": 0.4}
    bench.show({
        **seconds, "model": "gpt", "preset": "ddp", "degrees": {"dp": 2}, "precision": "fp32", "tokens_per_s": 1234.0,
        "samples_per_s": 56.0, "model_flops_per_s": 7.8e9, "payload_bytes_rank_0": 2**21, "steps": 5, "warmup": 2,
        "device": "cpu", "predicted": None, "world": 2, "cores": 2,
    })  # fmt: skip
    text = " ".join(capsys.readouterr().out.split())
    assert "median 200.0 ms tokens/s 1,234 quartiles 100.0 - 300.0 ms samples/s 56.0" in text
    assert "fastest 50.0 ms model GFLOP/s 7.8 95th percentile 400.0 ms payload of rank 0 per step 2.00 MiB" in text
