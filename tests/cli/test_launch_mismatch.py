"""Ranks that issue different collectives in their first steps are found at once,
whether they then hang, crash, or go on with garbage. Real training on four ranks; rank 3 is the odd one."""

from __future__ import annotations

import re
import time

import pytest

from tests.cli.launcher import run_attached, run_launcher, survivors
from tests.matrix import FULL

CASES = {
    # what rank 3 does -> what is told of it; late: the last of forward's sums changes places with the loss's
    "skip": ({"purpose": "activations"}, r"over tp \(ranks 2, 3\); collective \d+ is: "),
    "late": ({"purpose": "activations", "number": 9}, r"over tp \(ranks 2, 3\); collective \d+ is: "),
    "double": ({"purpose": "activations"}, r"over tp \(ranks 2, 3\); collective \d+ is: "),
    "skip the last": ({"do": "skip", "purpose": "control", "number": 1}, "nothing .it has ended the step."),
    "double the last": ({"do": "double", "purpose": "control", "number": 1}, r"over world \(ranks 0, 1, 2, 3\)"),
}


@pytest.mark.parametrize("case", [case for case in CASES if FULL or case != "double"])
def test_ranks_that_send_something_else_are_named_with_both_collectives(tmp_path, case):
    wish, words = CASES[case]
    began = time.monotonic()
    run = run_launcher(tmp_path, {"do": case, **wish}, worker="differ", timeout_s=300)
    assert run.wait() == 6, run.stderr
    assert time.monotonic() - began < 60, "it waited for the timeout"
    (line,) = [line for line in run.stderr.splitlines() if line.startswith("error: ")]
    assert re.search(r"error: step [12]: ranks issue different collectives over ", line) and re.search(words, line), (
        line
    )
    assert "rank 3" in line and "all_reduce" in line and "Traceback" not in run.stderr
    assert (run.status["state"], run.status["exit_code"]) == ("failed", 6)
    assert run.status["error"] in line
    assert not survivors(run.rank_pids(), 5.0)


def test_ranks_of_another_launcher_tell_it_too(tmp_path):
    wish = {"do": "skip", "purpose": "control", "number": 1, "rank": 1}
    ranks = run_attached(tmp_path, wish, worker="tests.cli.workers:differ", timeout_s=6)
    assert {rank.wait() for rank in ranks} <= {6, 7}
    told = ranks[0].stderr + ranks[1].stderr
    assert "ranks issue different collectives over" in told and "rank 1: nothing (it has ended the step)" in told, told
