"""What the tests of failures over two nodes share: two ranks on each, one of which fails, under a real launcher."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.matrix import FULL

TIMEOUT_S = 20
CODES = {"raise": 6, "segfault": 6, "SIGKILL": 6, "SIGSTOP": 7}
RANKS = (0, 1, 2, 3)
SLACK_S = 60  # of a machine that others use


def cells(launcher: str, always: Sequence[tuple[str, int]], ranks: Sequence[int] = RANKS) -> list[Any]:
    """Every failure of every rank; without --matrix=full only those that are always tried."""
    return [
        pytest.param(launcher, do, rank, marks=[] if FULL or (do, rank) in always else pytest.mark.skip("FULL"))
        for do in CODES
        for rank in ranks
    ]


def command(folder: Path, world: int = 4) -> list[str]:
    """What the launcher starts on every node, after `python`."""
    wanted = {"overrides": {"dp": world}, "runs": str(folder / "runs"), "timeout_s": TIMEOUT_S}
    return ["-m", "tests.cli.attached", json.dumps(wanted)]


def wish(do: str, culprit: int) -> str:
    """The variable PARALLELRUN_TEST of its ranks."""
    return json.dumps({"steps": 100_000, "rank": culprit, "do": do, "step": 20})


def check(run: Path, output: str, do: str, culprit: int, host: str, ended: float) -> None:
    """The right rank and host are blamed, and the job has ended in time. ended: as `time.time()`."""
    found = json.loads((run / "status.json").read_text())
    assert (found["state"], found["failed_rank"], found["exit_code"]) == ("failed", culprit, CODES[do]), output
    assert f"error: rank {culprit} (dp={culprit} tp=0 pp=0, {host}, pid " in output, output
    took = ended - (run / f"at_{culprit}").stat().st_mtime
    print(f"{do} of rank {culprit}: took {took:.1f} s")
    assert took < TIMEOUT_S + 10 + SLACK_S
