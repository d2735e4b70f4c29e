"""The line that shows how long something takes: on a terminal only, and gone afterwards."""

from __future__ import annotations

import os
import pty
import sys
import time

import pytest

from parallelrun.base import elapsed


def drawn(monkeypatch, seconds: float, until=lambda: False) -> str:
    """Return what a terminal gets from a block of so many seconds."""
    ours, terminal = pty.openpty()
    with open(terminal, "w") as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stream)
        patch.setenv("TERM", "xterm")
        with elapsed.shown("searching plans", until):
            time.sleep(seconds)
        os.set_blocking(ours, False)
        printed = b""
        try:
            while True:
                printed += os.read(ours, 65536)
        except BlockingIOError:
            return printed.decode()
        finally:
            os.close(ours)


def test_a_line_moves_within_a_second_and_is_gone_afterwards(monkeypatch):
    *lines, blank, end = drawn(monkeypatch, 1.5).split("\r")
    assert lines[0] == "| searching plans: 1 s" and lines[1] == "/ searching plans: 1 s"
    assert blank.strip() == end == "" and len(blank) >= len(lines[-1])


def test_what_is_done_soon_shows_nothing(monkeypatch):
    assert drawn(monkeypatch, 0.1) == ""


def test_the_line_ends_when_others_begin_to_print(monkeypatch):
    assert drawn(monkeypatch, 1.2, until=lambda: True).strip() == ""


@pytest.mark.parametrize("terminal", ["", "dumb"])
def test_without_a_terminal_nothing_is_started(monkeypatch, terminal, capfd):
    monkeypatch.setenv("TERM", terminal)
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("a process was started"))
    with elapsed.shown("searching plans"):
        pass
    assert capfd.readouterr() == ("", "")
