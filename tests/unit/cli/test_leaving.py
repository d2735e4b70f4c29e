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
    ("codes", "is_open", "expected"),
    [
        ([3], True, ["flushed", "flushed", 3]),
        ([0], True, ["flushed", "flushed", 0]),
        ([2], False, ["flushed", 2]),  # standard output was closed before the start
        ([], True, []),  # an exception, of which Python makes the exit code
    ],
)
def test_the_process_ends_with_the_exit_code_after_all_is_printed(codes, is_open, expected, monkeypatch):
    said: list[object] = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "_exit", said.append)
        patch.setattr(sys, "stdout", _Stream(said) if is_open else None)
        patch.setattr(sys, "stderr", _Stream(said))
        main._leave(codes)
    assert said == expected
