"""The end of a command: at once, with its exit code, and with all that it has printed."""

from __future__ import annotations

import os
import sys

import pytest

from parallelrun.cli import main


class _Stream:
    def __init__(self, said: list[object]):
        self._said = said

    def flush(self) -> None:
        self._said.append("flushed")


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([3], ["flushed", "flushed", 3]),
        ([0], ["flushed", "flushed", 0]),
        ([], []),  # an exception, of which Python makes the exit code
    ],
)
def test_the_process_ends_with_the_exit_code_after_all_is_printed(codes, expected, monkeypatch):
    said: list[object] = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "_exit", said.append)
        patch.setattr(sys, "stdout", _Stream(said))
        patch.setattr(sys, "stderr", _Stream(said))
        main._leave(codes)
    assert said == expected
