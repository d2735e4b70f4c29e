"""The sweep's table on wide and narrow screens."""

from __future__ import annotations

import json

import pytest

from parallelrun.report import sweep


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
    (tmp_path / sweep.RESULTS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_a_file_gets_every_column_whole(directory, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    sweep.show(directory)
    text = capsys.readouterr().out
    assert "…" not in text and "sent a step" in text and "9.62 MiB" in text


def test_a_narrow_terminal_gets_fewer_columns_and_is_told_which_are_left_out(directory, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    sweep.show(directory)
    text = capsys.readouterr().out
    assert "…" not in text and "terminal is narrow: loss" in text and "4.097" in text
