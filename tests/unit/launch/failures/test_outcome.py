"""The end of a run: first its final status, then the message."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from parallelrun.launch.failures.failure import Failure
from parallelrun.launch.failures.outcome import Outcome, conclude
from parallelrun.launch.host.job import Job
from tests.plans import tiny_config, tiny_plan


class _Terminal(io.StringIO):
    """Notes the state of the run at each write."""

    def __init__(self, directory: Path):
        super().__init__()
        self.states: list[str] = []
        self._directory = directory

    def write(self, text: str) -> int:
        self.states.append(json.loads((self._directory / "status.json").read_text())["state"])
        return super().write(text)


@pytest.mark.parametrize(
    ("outcome", "state"),
    [
        (Outcome(6, Failure(1, "died: SIGKILL", 6)), "failed"),
        (Outcome(75), "preempted"),
        (Outcome(130, note="interrupted at step 3"), "interrupted"),
    ],
)
def test_whoever_reads_the_message_finds_the_final_status(tmp_path, outcome, state):
    terminal = _Terminal(tmp_path)
    conclude(outcome, Job(tiny_config(dp=2), tiny_plan(dp=2), tmp_path), terminal)
    assert set(terminal.states) == {state}
