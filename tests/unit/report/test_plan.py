"""`plan` on screen and as JSON: complete, within its width, legible without colour, and without torch."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from parallelrun.plan.resolve import resolve
from parallelrun.report.figures import bytes_text, count_text, flops_text, seconds_text
from parallelrun.report.plan import document, ranks_text, show
from tests.plans import tiny_config

ROOT = Path(__file__).parents[3]
LARGE = {
    "model.layers": 96,
    "model.hidden": 12288,
    "model.heads": 96,
    "model.seq": 2048,
    "model.vocab": 50257,
    "tp": 8,
    "pp": 64,
    "dp": 6,
    "global_batch": None,
    "device": "cuda",
    "cluster.gpus_per_node": 8,
    "cluster.memory_gb": 80.0,
}


def shown(overrides, width=100, **console):
    config = tiny_config(overrides)
    file = io.StringIO()
    show(resolve(config), config, Console(file=file, width=width, **console))
    return file.getvalue()


@pytest.mark.parametrize("width", [80, 100, 120])
@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("overrides", [{}, {"dp": 2, "tp": 2, "pp": 2}, {"pp": 4, "schedule": "gpipe"}, LARGE], ids=len)
def test_no_line_is_wider_than_the_console(overrides, width, terminal):
    text = shown(overrides, width, force_terminal=terminal, no_color=True, color_system=None)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "\x1b" not in text


def test_every_part_is_there():
    text = shown({"dp": 2, "tp": 2, "pp": 2})
    for part in ("plan", "mesh", "ranks", "batch", "stages and memory", "schedule", "collectives of a step", "cost"):
        assert part in text
    assert "8 ranks = pp 2 x dp 2 x tp 2" in text
    assert "fits: unknown" in text and "not counted:" in text
    assert "8 samples of 8 tokens = dp 2 x 4 microbatches x 1 sample;" in text
    assert "equals one device: exact" in text and "bubble" in text and "FLOP" in text


def test_panels_on_a_terminal_and_plain_lines_elsewhere():
    assert "╭" in shown({}, force_terminal=True) and "╭" not in shown({}, force_terminal=False)


def test_the_gantt_shows_the_microbatches_of_every_coordinate():
    text = shown({"pp": 2, "microbatches": 4, "global_batch": 8, "model.tied_embeddings": False})
    (first,), (second,) = ([line for line in text.splitlines() if line.startswith(f"pp {p} ")] for p in (0, 1))
    assert [mark for mark in first if mark.isdigit()][1:] == list("01021323")
    assert [mark for mark in second if mark.isdigit()][1:] == list("00112233")
    assert second[5] == " ", "the last stage begins idle"


def test_colour_tells_the_kinds_apart_on_a_terminal():
    coloured = shown({"pp": 2}, force_terminal=True, color_system="truecolor", no_color=False)
    assert "\x1b[" in coloured


def test_a_large_plan_lists_the_first_and_the_last_host():
    text = shown(LARGE)
    lines = text.splitlines()
    assert sum(" worker " in line for line in lines) == 16
    assert any(line.split()[:3] == ["3071", "383", "7"] for line in lines)
    assert "3,056 ranks between are left out" in text


def test_ranks_all_prints_every_rank_as_plain_lines():
    text = shown({**LARGE, "ranks": "all"}, width=120)
    assert sum("role=worker" in line for line in text.splitlines()) == 3072


def test_what_does_not_fit_is_a_warning():
    text = shown({**LARGE, "cluster.memory_gb": 1.0}, width=120)
    assert "fits: no" in text and "does not fit" in text


def test_the_document_is_json_with_every_rank():
    config = tiny_config(dp=2, tp=2, pp=2)
    data = json.loads(json.dumps(document(resolve(config), config), allow_nan=False))
    assert data["schema"] == 1 and data["world"] == 8 and data["degrees"] == {"pp": 2, "dp": 2, "tp": 2, "ep": 1}
    assert [row["rank"] for row in data["ranks"]] == list(range(8))
    assert data["ranks"][5] == {"rank": 5, "node": 0, "gpu": None, "role": "worker", "pp": 1, "dp": 0, "tp": 1}
    assert data["memory"]["fits"] == "unknown" and len(data["memory"]["per_position"]) == 2
    assert {row["axis"] for row in data["communication"]["rows"]} >= {"dp", "tp", "pp"}
    assert all(row["purpose"] != "control" for row in data["communication"]["rows"])
    assert sum(len(stage["blocks"]) for stage in data["stages"]) == data["model"]["blocks"]


def test_hosts_come_from_the_cluster():
    config = tiny_config({"dp": 4, "tp": 2, "cluster.gpus_per_node": 4, "device": "cuda"})
    rows = document(resolve(config), config)["ranks"]
    assert [(row["node"], row["gpu"]) for row in rows] == [(n, g) for n in range(2) for g in range(4)]


def test_planning_3072_ranks_imports_no_torch_and_is_fast():
    code = f"""
import io, sys, time
from rich.console import Console
from parallelrun.plan.resolve import resolve
from parallelrun.report.plan import show
from tests.plans import tiny_config
config = tiny_config({LARGE!r})
begin = time.process_time()
show(resolve(config), config, Console(file=io.StringIO(), width=100))
assert "torch" not in sys.modules
print(time.process_time() - begin)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (bytes_text(1536), "1.5 KiB"),
        (bytes_text(12), "12 B"),
        (bytes_text(3 * 2**40), "3 TiB"),
        (count_text(175_100_000_000), "175 B"),
        (count_text(12), "12"),
        (count_text(1.5e12), "1.5 T"),
        (flops_text(3.39e18), "3.39 EFLOP"),
        (seconds_text(0.0031), "3.1 ms"),
        (ranks_text([0, 8, 16]), "0 8 16"),
        (ranks_text(list(range(0, 512, 8))), "0 8 16 .. 504"),
    ],
)
def test_numbers_for_people(text, expected):
    assert text == expected


def test_row_24_more_ranks_than_cores_is_said_unless_another_cluster_is_planned_for():
    many = {"dp": 2048, "global_batch": None}
    assert "no scaling measurement" in shown(many)
    assert "no scaling measurement" not in shown({**many, "cluster.gpus_per_node": 8})
