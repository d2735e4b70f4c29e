"""Experts as a user sees them: a heat map in the summary, routing.jsonl in the run directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from parallelrun.cli import main as program
from tests.cli.launcher import run_to_end

STEPS = 12
COMMAND = [
    "model=moe_gpt", "strategy=aux_free", "dp=2", "ep=2", f"steps={STEPS}", "model.hidden=32", "model.seq=32",
    "global_batch=8", "tracker=none", "eval.every=0",
]  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Dropless experts: what is sent depends on the data."""
    folder = tmp_path_factory.mktemp("experts")
    done = run_to_end(*COMMAND, cwd=folder, COLUMNS="120")
    assert done.returncode == 0, done.stderr
    (directory,) = folder.glob("runs/moe_gpt-aux_free-dp2ep2/*")
    return done.stdout, directory


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_summary_has_the_balance_and_what_was_sent_was_within_bounds(trained: tuple[str, Path]) -> None:
    _, directory = trained
    summary = json.loads((directory / "summary.json").read_text())
    files = [read(directory / name) for name in ("routing.jsonl", "metrics.jsonl")]
    assert [[row["step"] for row in rows] for rows in files] == [list(range(1, STEPS + 1))] * 2
    assert all(row["drop_rate"] == 0.0 and row["max_vio"] > 0 and row["aux_loss"] > 0.5 for row in files[1])
    assert summary["first_max_vio"] > 0 and summary["max_vio"] > 0
    assert summary["drop_rate"] == 0.0 and 0 < summary["load_entropy"] <= 1
    rows = json.loads((directory / "comm.json").read_text())["rows"]
    bounded = [row for row in rows if row["predicted_most_bytes"] is not None]
    assert {(row["axis"], row["purpose"]) for row in bounded} == {("ep", "experts")}
    assert all(0 < row["payload_bytes"] <= row["predicted_most_bytes"] for row in bounded)
    assert summary["communication_as_predicted"] is True


def test_the_heat_map_is_on_the_screen(trained: tuple[str, Path]) -> None:
    screen, _ = trained
    lines = screen.splitlines()
    (start,) = [number for number, line in enumerate(lines) if "layers.1.moe" in line and "layers.3.moe" in line]
    assert [line.strip("│ ").split()[0] for line in lines[start + 1 : start + 9]] == [
        str(expert) for expert in range(8)
    ]
    assert "MaxVio" in lines[start - 1] and "nothing dropped" in lines[start - 1]
    assert "within the predicted bounds" in screen
    assert any(line.startswith("step") and "max_vio" in line for line in lines)


def test_the_plan_says_what_no_step_can_exceed(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["plan", "model=moe_gpt", "strategy=dropless", "dp=2", "ep=2", "detail=traffic"]) == 0
    out = capsys.readouterr().out
    assert "(<= " in out and "where the bytes depend on the data" in " ".join(out.split())
    assert program.main(["plan", "model=moe_gpt", "strategy=gshard", "dp=2", "ep=2", "detail=traffic"]) == 0
    assert "<=" not in capsys.readouterr().out
