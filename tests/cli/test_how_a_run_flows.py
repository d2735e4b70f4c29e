"""docs/how_a_run_flows.md names every function on the way from argv to the collective, in the order of the calls."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.cli.launcher import program_in, run_to_end

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "how_a_run_flows.md"
SMALL = (
    "model.layers=2",
    "model.hidden=16",
    "model.heads=2",
    "model.seq=16",
    "global_batch=4",
    "steps=1",
    "eval.every=0",
)
MAX_UNLISTED = 2  # modules of ours between two listed functions
MAX_FILES = 16  # from argv to the collective of ddp
Call = tuple[str, str]  # file below the root, function


def flows() -> dict[str, list[Call]]:
    """The rows of the page's tables: file and function, by the name of the table."""
    tables = re.findall(r"<!-- flow: (.*?) -->\n(.*?)<!-- end -->", PAGE.read_text(), re.S)
    rows = r"^\| [^|]+ \| `(\w+)` \| \[[^]]+\]\(\.\./([^)]+)\)"
    return {name: [(file, function) for function, file in re.findall(rows, text, re.M)] for name, text in tables}


def commands() -> dict[str, list[str]]:
    """The command above each table, by the name of the table."""
    found = re.findall(r"^parallelrun (.*)$", PAGE.read_text(), re.M)
    return dict(zip(flows(), (command.split() for command in found), strict=True))


def traced(call: dict[str, Any]) -> int:
    """In a warm process: `program_in`, which writes the stack of our functions whenever a listed one is called. The
    profiler is inherited by forked ranks."""
    rows, out = json.loads(os.environ["PARALLELRUN_TEST"])
    listed, file = {tuple(row) for row in rows}, os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    ours = (f"{ROOT}/parallelrun/", f"{ROOT}/strategies/")

    def stack(frame: FrameType | None) -> list[Call]:
        calls = []
        while frame is not None:
            code = frame.f_code
            if code.co_filename.startswith(ours):
                calls.append((os.path.relpath(code.co_filename, ROOT), code.co_name))
            frame = frame.f_back
        return calls[::-1]

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and (code.co_filename.removeprefix(f"{ROOT}/"), code.co_name) in listed:
            os.write(file, json.dumps([os.getpid(), stack(frame)]).encode() + b"\n")

    sys.setprofile(profile)
    return program_in(call)


def stacks(name: str, folder: Path) -> list[list[Call]]:
    """The stacks at every call of a listed function: of the launcher, then of one rank, in order."""
    out = folder / "calls.jsonl"
    order = json.dumps([flows()[name], str(out)])
    words = [*commands()[name], *SMALL]
    done = run_to_end(*words, cwd=folder, function=f"{__name__}:traced", timeout=240, PARALLELRUN_TEST=order)
    assert done.returncode == 0, done.stdout + done.stderr
    calls = [json.loads(line) for line in out.read_text().splitlines()]
    launcher = calls[0][0]
    rank = next(pid for pid, stack in calls if pid != launcher)
    return [[tuple(call) for call in stack] for pid, stack in calls if pid in (launcher, rank)]


def check(listed: list[Call], stacks: list[list[Call]]) -> None:
    """Each listed function is called after the one before it, through few modules that are not listed."""
    files, before, at = {file for file, _ in listed}, [], 0
    for call in listed:
        at = next((i for i in range(at, len(stacks)) if stacks[i][-1] == call), len(stacks))
        assert at < len(stacks), f"{call} is not called after the functions listed before it"
        differs = (i for i, (old, new) in enumerate(zip(before, stacks[at])) if old != new)
        shared = next(differs, min(len(before), len(stacks[at])))
        unlisted = {file for file, _ in stacks[at][shared:] if file not in files}
        assert len(unlisted) <= MAX_UNLISTED, f"on the way to {call}: {sorted(unlisted)}"
        before, at = stacks[at], at + 1


@pytest.mark.parametrize("name", flows())
def test_the_page_lists_the_calls_in_their_order(name, tmp_path):
    listed, found = flows()[name], stacks(name, tmp_path)
    check(listed, found)
    with pytest.raises(AssertionError, match="not called after"):
        check([listed[1], listed[0], *listed[2:]], found)
    with pytest.raises(AssertionError, match="on the way"):
        check([listed[0], listed[-1]], found)


def test_the_way_of_ddp_is_short():
    assert len({file for file, _ in flows()["ddp"]}) <= MAX_FILES
    words = re.sub(r"^\|[-|]+$|\|", " ", PAGE.read_text(), flags=re.M).split()  # without the lines of tables
    assert len(words) <= 700
