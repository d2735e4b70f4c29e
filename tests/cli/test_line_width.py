"""Without a terminal, text has lines of at most 100 columns; commands, paths and tables are whole. A command to copy
has a line of its own, in no frame."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from parallelrun.report import chart
from tests.cli.launcher import program, program_in, run_to_end

TINY = [
    "model=gpt",
    "model.hidden=16",
    "model.layers=2",
    "model.heads=2",
    "model.seq=8",
    "eval.every=0",
    "global_batch=4",
]
LLAMA = ["plan", "model=llama3_8b", "cluster=h100_dgx"]
SCREENS = {
    "help": ["--help"],
    "help of a verb": ["plan", "--help"],
    "plan": ["plan", "model=gpt3_175b", "tp=8", "pp=64", "dp=6"],
    "plan that does not fit": [*LLAMA, "strategy=ddp", "dp=2"],
    "details": ["plan", *TINY, "strategy=ps", "world=4", "detail=all"],
    "details of a pipeline": ["plan", "model=gpt", "tp=2", "pp=2", "dp=2", "detail=schedule,traffic"],
    "explained plan": ["plan", "model=gpt2_124m", "cluster=h100_dgx", "strategy=fsdp", "dp=2", "explain=true"],
    "search": [*LLAMA, "gpus=4"],
    "sizes": ["plan", "model=gpt2_124m", "cluster=h100_dgx", "objective=cost", "tokens=1e12", "gpus=4"],
    "plans": ["plan", "-m", "strategy=ddp,tp2d,gpipe", "world=4"],
    "explain": ["explain", "strategy=gpipe", "pp=4"],
    "refusal": ["plan", "strategy=tp2d", "tp=5"],
    "unknown key": ["plan", "modle=gpt"],
    "too large": ["model=gpt3_175b", "strategy=ddp", "dp=2"],
    "no GPU": [*TINY, "strategy=ddp", "dp=2", "device=cuda"],
    "no run": ["compare", "a", "b"],
    "runs": ["runs", "ls"],
    "strategies": ["ls", "strategies"],
    "doctor": ["doctor"],
}
BEGINS = "=== screen: "
COMMAND = re.compile(r"\s*(try: )?(parallelrun|pip|python) |point \d+: |\s*resume=")
CELLS = re.compile(r"\S {2,}\S|─{20}|[█▏▎▍▌▋▊▉]")  # of tables


def narrow(call: dict[str, Any]) -> int:
    """In a warm process: `program_in`, as if imported without the variable that makes lines long in tests."""
    most = int(os.environ.pop("PARALLELRUN_COLUMNS"))
    for module in [module for name, module in sys.modules.items() if name.startswith("parallelrun.")]:
        if getattr(module, "COLUMNS", 0) == most:
            module.COLUMNS = 100
    chart.available = lambda: False  # a sweep's picture has no lines of text
    return program_in(call)


def narrow_one_by_one(call: dict[str, Any]) -> int:
    """In a warm process: each screen below its name, on one stream."""
    os.dup2(1, 2)
    narrow({**call, "words": ["--version"]})
    for name, words in SCREENS.items():
        print(f"{BEGINS}{name}", flush=True)
        program(words)
        sys.stdout.flush()
    return 0


def screen(*words: str, cwd: Path, function: str = "narrow") -> list[str]:
    done = run_to_end(*words, cwd=cwd, function=f"{__name__}:{function}", timeout=240)
    return (done.stdout + done.stderr).splitlines()


@pytest.fixture(scope="module")
def screens(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The lines of each of SCREENS."""
    drawn: dict[str, list[str]] = {}
    for line in screen(cwd=tmp_path_factory.mktemp("screens"), function="narrow_one_by_one"):
        if line.startswith(BEGINS):
            drawn[line.removeprefix(BEGINS)] = []
        elif drawn:
            drawn[list(drawn)[-1]].append(line)
    return drawn


def test_a_new_process_has_100_columns(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PARALLELRUN_COLUMNS"}
    code = "from parallelrun.base import wording; print(wording.COLUMNS)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, text=True, capture_output=True)
    assert done.stdout == "100\n"


@pytest.mark.parametrize("name", SCREENS)
def test_lines_of_text_end_at_100_columns(name, screens):
    lines = screens[name]
    long = [
        line for line in lines if len(line) > 100 and not COMMAND.match(line) and not CELLS.search(line.strip()[10:])
    ]
    assert lines and long == []
    if "run it:" in lines:
        command = lines[lines.index("run it:") + 1]
        assert command.startswith(f"parallelrun {SCREENS[name][1]}") and "\n" not in command


@pytest.mark.slow
def test_a_run_a_verification_and_their_comparison_end_at_100_columns(tmp_path):
    commands = ([*TINY, "strategy=ddp", "dp=2", "steps=2", "checkpoint.every=1", "name=one"],
                ["verify", *TINY, "strategy=zero1", "dp=2"], ["-m", *TINY, "strategy=ddp,tp", "world=2", "steps=1"],
                ["compare", "one", "gpt-zero1-dp2"], ["runs", "show", "one"])  # fmt: skip
    for words in commands:
        lines = screen(*words, cwd=tmp_path)
        long = [line for line in lines if len(line) > 100 and "/" not in line and not COMMAND.match(line)]
        assert lines and [line for line in long if not CELLS.search(line.strip()[10:])] == []
