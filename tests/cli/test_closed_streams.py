"""Standard streams that the shell has closed (`2>&-`): every verb ends as with open ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import pytest

from tests.cli.launcher import program_in, run_to_end
from tests.matrix import FULL

TINY = ("model=gpt", "model.layers=2", "model.hidden=16", "model.heads=2", "model.seq=8", "dataset=synthetic",
        "global_batch=4", "eval.every=0", "steps=2")  # fmt: skip
STREAMS = ("stdin", "stdout", "stderr")
ALL = list(chain.from_iterable(combinations(range(3), count) for count in (1, 2, 3)))
OTHERS = [
    pytest.param(("verify", *TINY, "dp=2"), 0, id="verify"),
    pytest.param(("bench", *TINY, "dp=2"), 0, id="bench"),
    pytest.param(("-m", *TINY, "dp=1,2"), 0, id="sweep"),
    pytest.param((*TINY, "strategy=single"), 0, id="inline"),
    pytest.param(("plan", *TINY, "dp=2"), 0, id="plan"),
    pytest.param(("doctor",), 0, id="doctor"),
    pytest.param(("ls", "strategies"), 0, id="ls"),
    pytest.param(("nosuch=1",), 2, id="refused"),
]


def with_closed(call: dict[str, Any]) -> int:
    """In a warm process: close the streams whose numbers are in PARALLELRUN_TEST, as a shell and Python's start do."""
    for number in json.loads(os.environ["PARALLELRUN_TEST"]):
        os.close(number)
        setattr(sys, STREAMS[number], None)
    try:
        return program_in(call)
    finally:  # the caller flushes them
        for name in STREAMS:
            setattr(sys, name, getattr(sys, name) or sys.__stderr__)


def run(folder: Path, words: tuple[str, ...], closed: tuple[int, ...], **environ: str) -> int:
    wish = json.dumps(closed)
    called = f"{__name__}:with_closed"
    return run_to_end(*words, cwd=folder, function=called, PARALLELRUN_TEST=wish, **environ).returncode


@pytest.mark.parametrize(
    "closed", ALL if FULL else [(1,), (2,), (0, 1, 2)], ids=lambda closed: "".join(map(str, closed))
)
def test_a_run_ends_well_whichever_streams_are_closed(tmp_path, closed):
    assert run(tmp_path, (*TINY, "strategy=ddp", "dp=2"), closed) == 0
    (status,) = tmp_path.glob("runs/*/*/status.json")
    assert (json.loads(status.read_text())["state"], json.loads(status.read_text())["step"]) == ("done", 2)


@pytest.mark.parametrize("closed", ALL if FULL else [(0, 1, 2)], ids=lambda closed: "".join(map(str, closed)))
@pytest.mark.parametrize(("words", "code"), OTHERS)
def test_every_verb_has_its_exit_code_whichever_streams_are_closed(tmp_path, words, code, closed):
    assert run(tmp_path, words, closed) == code


@pytest.mark.parametrize("redirection", ["2>&-", "<&- >&-"] if FULL else ["<&- >&- 2>&-"])
def test_the_program_itself_starts_with_closed_streams(tmp_path, redirection):
    verb = "run" if FULL else "plan"  # which imports no torch; warm processes run above
    words = f"{sys.executable} -m parallelrun {verb} {' '.join(TINY)} strategy=ddp dp=2 {redirection}"
    assert subprocess.run(["sh", "-c", words], cwd=tmp_path, timeout=120).returncode == 0
