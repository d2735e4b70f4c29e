"""`plan` on screen and as JSON: complete, within its width, legible without colour, and without torch."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import pytest
from rich.console import Console

from parallelrun.planner.facts.document import document
from parallelrun.planner.facts.plan_facts import facts
from parallelrun.planner.resolve.resolve_config import resolve
from parallelrun.report.figures import bytes_text, count_text, flops_text, ranks_text, seconds_text
from parallelrun.report.plans.plan import show
from parallelrun.report.screen import open_console
from tests.matrix import FULL, every
from tests.plans import tiny_config
from tests.unit.config.test_presets import composed

ROOT = Path(__file__).parents[4]
LARGE = {
    "model.layers": 96, "model.hidden": 12288, "model.heads": 96, "model.seq": 2048, "model.vocab": 50257, "tp": 8,
    "pp": 64, "dp": 6, "global_batch": None, "device": "cuda", "cluster.gpus_per_node": 8, "cluster.memory_gb": 80.0,
}  # fmt: skip


PRESETS = (
    "model=gpt",
    "model=gpt strategy=single",
    "model=gpt strategy=ptdp tp=2 pp=2",
    "model=gpt3_175b strategy=ptdp tp=8 pp=64 dp=6",
    "model=gpt3_175b strategy=ptdp tp=8 pp=64 dp=6 cluster=a100_40gb tokens=300e9",
    "recipe=sc21_1t",
    "model=gpt_1t strategy=ptdp tp=8 pp=64 dp=6 cluster=a100_dgx tokens=450e9 mtbf_gpu_hours=5e4 checkpoint_gb_s=20",
    "model=vgg16 strategy=ps dp=6 servers=2 cluster=ethernet_25g",
    "model=gpt strategy=ps dp=3 servers=2 consistency=ssp staleness=1",
    "model=resnet50 strategy=horovod dp=8",
    "model=moe_gpt strategy=gshard dp=4 ep=2 tp=2 pp=2",
    "model=gshard_600b dp=2048 ep=2048",
    "model=deepseek_v3 dp=128 ep=64 pp=16 strategy=aux_free",
    "model=mixtral_8x7b strategy=dropless dp=16 ep=8 tp=4 pp=4",
    "model=llama3_70b strategy=hsdp dp=16 strategy.data.shard=8 cluster=h100_dgx",
    "model=mt_nlg_530b strategy=tp25d tp=64 strategy.tensor.depth=4",
    "model=gpt_1t strategy=tp3d tp=64",
)


@cache
def planned(*overrides):
    """The tiny configuration with the pairs (key, value) of `overrides`, its plan and the facts of it."""
    config = tiny_config({"verb": "plan", **dict(overrides)})
    plan = resolve(config)
    return plan, config, facts(plan, config)


def shown(overrides, width=100, **console):
    plan, config, found = planned(*overrides.items())
    file = io.StringIO()
    show(plan, config, Console(file=file, width=width, **console), found)
    return file.getvalue()


NARROWEST = (80, True)  # the width of a console and whether it is a terminal, whose frame takes four columns
CONSOLES = [(80, False), (120, True), (120, False)]


@pytest.mark.parametrize("line", every(2, PRESETS))
def test_the_summary_has_at_most_40_lines_warnings_first(line, monkeypatch):
    found = composed(*line.split())
    plan = resolve(found.config, given=found.given)
    computed = facts(plan, found.config)
    texts, asked = document(plan, found.config, computed)["warnings"], []
    monkeypatch.setattr("parallelrun.report.plans.plan.warnings", lambda *told: [asked.append(told), texts][1])
    consoles = [NARROWEST, *(CONSOLES if FULL else [CONSOLES[PRESETS.index(line) % 3]])]
    for width, terminal in consoles:
        file = io.StringIO()
        console = Console(file=file, width=width, force_terminal=terminal, no_color=True, color_system=None)
        show(plan, found.config, console, computed)
        lines = file.getvalue().splitlines()
        assert len(lines) <= 40 and max(map(len, lines)) <= width and not any("…" in text for text in lines)
        labels = [word for text in lines if (word := text.lstrip("│ ").split(" ")[0]) in LABELS]
        assert labels == [label for label in LABELS if label in labels] and set(labels) >= set(LABELS[-7:])
        assert ("warning" in labels) == bool(texts)
        words = " ".join(text.strip("│ ") for text in lines)
        assert all(f"{kind} " in words for kind in computed.memories[0].parts), "no part's name is cut"
        hint = " ".join(text.strip("│ ") for text in lines[-4:])
        assert "More: detail=ranks|stages|schedule|traffic|data_axis|layouts|all" in hint
    assert asked == [(plan, found.config, computed)] * len(consoles), (
        "advice takes a second: it is computed once for a summary"
    )


LABELS = ("warning", "model", "strategy", "mesh", "batch", "memory", "schedule", "traffic", "cost")


PLANNED = [{}, {"dp": 2, "tp": 2, "pp": 2}, {"pp": 4, "schedule": "gpipe"}, {**LARGE, "pp": 16, "model.layers": 32}]
# By default the narrowest, and of small plans every second one: every pair of a width, a kind of console and a plan.
SHOWN = [(PLANNED[n], width, terminal) for n, width, terminal in product(range(4), (80, 100, 120), (False, True))
         if FULL or (width, terminal) == NARROWEST or (n < 3 and (n + width // 20 + terminal) % 2 == 0)]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("overrides", "width", "terminal"), SHOWN)
def test_no_line_is_wider_than_the_console(overrides, width, terminal):
    text = shown({**overrides, "detail": "all"}, width, force_terminal=terminal, no_color=True, color_system=None)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "\x1b" not in text


def test_the_summary_tells_what_the_plan_does():
    text = shown({"dp": 2, "tp": 2, "pp": 2})
    assert "8 ranks = pp 2 x dp 2 x tp 2 on 1 host" in text
    assert "fits: unknown" in text and "weights" in text and "GFLOP" in text.replace("MFLOP", "GFLOP")
    assert "8 samples of 8 tokens = dp 2 x 4 microbatches x 1 sample" in text
    assert "against one device: exact" in text and "1f1b: the bubble is" in text
    for axis in ("dp (2)", "tp (2)", "pp (2)", "sum"):
        assert axis in text


def test_the_traffic_of_the_summary_adds_up_to_that_of_the_document():
    config = tiny_config({"dp": 2, "tp": 2, "pp": 2})
    plan = resolve(config)
    rows = [row for row in document(plan, config)["communication"]["rows"] if row["operation"] != "recv"]
    (line,) = [line for line in shown({"dp": 2, "tp": 2, "pp": 2}).splitlines() if line.split()[:1] == ["sum"]]
    assert line.split("sum")[1].split() == [
        word for name in ("wire_bytes", "total_wire_bytes")
        for word in bytes_text(sum(row[name] for row in rows)).split()
    ]  # fmt: skip


def test_many_warnings_do_not_push_the_summary_off_the_page():
    config = tiny_config(LARGE)
    warned = replace(resolve(config), warnings=tuple(f"warning {i}: " + "words " * 20 for i in range(30)))
    for terminal in (True, False):
        file = io.StringIO()
        show(warned, config, Console(file=file, width=80, force_terminal=terminal, no_color=True, color_system=None))
        assert len(file.getvalue().splitlines()) <= 40 and "more warnings: see --json" in file.getvalue()


def test_details_are_shown_when_asked_for():
    parts = {
        "ranks": "mesh and ranks", "stages": "stages and memory", "schedule": "blank idle",
        "data_axis": "data-parallel strategies side by side",
        "traffic": "collectives of a step", "layouts": "tensor layouts side by side",
    }  # fmt: skip
    every = {"dp": 2, "tp": 4, "pp": 2, "model.heads": 4}
    several = ("stages,traffic", ("stages", "traffic"))
    for detail, sections in (("", ()), ("ranks", ("ranks",)), several, ("all", parts)):
        text = shown({**every, "detail": detail or None})
        assert {name for name, title in parts.items() if title in text} == set(sections)


def test_panels_on_a_terminal_and_plain_lines_elsewhere():
    assert "╭" in shown({"detail": "all"}, force_terminal=True)
    plan, config, _ = planned(("detail", "all"))
    show(plan, config, open_console(file=(file := io.StringIO()), force_terminal=False))
    text = file.getvalue()
    assert "╭" not in text and " \n" not in text


def test_the_gantt_shows_the_microbatches_of_every_coordinate():
    text = shown({"pp": 2, "microbatches": 4, "global_batch": 8, "model.tied_embeddings": False, "detail": "schedule"})
    (first,), (second,) = ([line for line in text.splitlines() if line.startswith(f"pp {p} ")] for p in (0, 1))
    assert [mark for mark in first if mark.isdigit()][1:] == list("01021323")
    assert [mark for mark in second if mark.isdigit()][1:] == list("00112233")
    assert second[5] == " ", "the last stage begins idle"


def test_colour_tells_the_kinds_apart_on_a_terminal():
    coloured = shown({"pp": 2, "detail": "schedule"}, force_terminal=True, color_system="truecolor", no_color=False)
    assert "\x1b[" in coloured and ";44m" in coloured


def test_the_ranks_are_all_shown_up_to_200_rows():
    lines = shown({"dp": 200, "global_batch": None, "detail": "ranks"}).splitlines()
    assert sum(" worker " in line for line in lines) == 200 and "left out" not in "".join(lines)


def test_above_200_ranks_the_screen_says_how_many_are_left_out():
    text = shown({**LARGE, "detail": "ranks"})
    lines = text.splitlines()
    assert sum(" worker " in line for line in lines) == 200
    assert any(line.split()[:3] == ["3071", "383", "7"] for line in lines)
    assert "2,872 ranks between them are left out; --json has all 3,072" in text


def test_what_does_not_fit_is_a_warning():
    large = {"model.hidden": 2048, "cluster.memory_gb": 0.1}
    text = shown({"dp": 2, "tp": 2, "pp": 2, "device": "cuda", **large}, width=120)
    assert "fits: no" in text and "does not fit" in text


def test_the_document_is_json_with_every_rank():
    config = tiny_config(dp=2, tp=2, pp=2)
    data = json.loads(json.dumps(document(resolve(config), config), allow_nan=False))
    assert (
        data["schema"] == 1 and data["world"] == 8 and data["degrees"] == {"pp": 2, "dp": 2, "cp": 1, "tp": 2, "ep": 1}
    )
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


LARGE_PLANS = {  # with the CPU seconds that it may take to plan and to draw
    "model=gpt3_175b strategy=ptdp tp=8 pp=64 dp=6 cluster.gpus_per_node=8 cluster.memory_gb=80": 3,
    "model=gshard_600b dp=2048 ep=2048": 4,
    "model=mixtral_8x7b dp=16 ep=8 tp=4 pp=4": 4,
    "model=deepseek_v3 dp=128 ep=64 pp=16 strategy=aux_free": 4,
    "model=switch_base dp=8 ep=8 strategy=switch": 4,
}


def test_large_plans_import_no_torch_and_are_fast():
    code = f"""
import io, sys, time
from rich.console import Console
from parallelrun.planner.resolve.resolve_config import resolve
from parallelrun.report.plans.plan import show
from tests.unit.config.test_presets import composed
for line, limit in {dict(every(2, LARGE_PLANS.items()))!r}.items():
    found = composed(*line.split())
    begin = time.process_time()
    plan = resolve(found.config, given=found.given)
    show(plan, found.config, Console(file=io.StringIO(), width=100))
    assert "torch" not in sys.modules and plan.world > 1
    assert time.process_time() - begin < limit, line
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


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
        (flops_text(2.5e21), "2500 EFLOP"),
        (seconds_text(0.0031), "3.1 ms"),
        (seconds_text(0.9997), "1 s"),
        (seconds_text(1130), "1130 s"),
        (ranks_text([0, 8, 16]), "0 8 16"),
        (ranks_text(list(range(0, 512, 8))), "0 8 16 .. 504 (64 ranks)"),
        (ranks_text([*range(64)]), "0 to 63"),
    ],
)
def test_numbers_for_people(text, expected):
    assert text == expected


def test_row_24_more_ranks_than_cores_is_said_unless_another_cluster_is_planned_for():
    many = {"dp": 2048, "global_batch": None}
    assert "no scaling measurement" in shown(many)
    assert "no scaling measurement" not in shown({**many, "cluster.gpus_per_node": 8})
