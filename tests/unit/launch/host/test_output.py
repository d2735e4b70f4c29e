"""Standard output that is full, closed, or no longer read; the terminal and its copy in a log."""

from __future__ import annotations

import errno
import io
import os
import sys
from itertools import product

import pytest

from parallelrun.cli import main as program
from parallelrun.launch.host import output
from parallelrun.launch.host.output import Screen
from tests.matrix import FULL


class Broken(io.StringIO):
    """Fails with `number`, at the first write or only when flushed, as buffered streams do."""

    def __init__(self, number: int, buffered: bool):
        super().__init__()
        self.number, self.buffered = number, buffered

    def write(self, text: str) -> int:
        if not self.buffered:
            raise OSError(self.number, "no more")
        return len(text)

    def flush(self) -> None:
        raise OSError(self.number, "no more")


LINES = ("ls", "plan tp=2", "plan --json -m tp=2", "--help", "show quickstart")
CODES = ((errno.EPIPE, 0), (errno.ENOSPC, 3))
# By default every second one: every pair of a command, an error and where it comes.
UNWRITTEN = [(LINES[n], bool(late), *CODES[error]) for n, late, error in product(range(5), range(2), range(2))
             if FULL or (n + late + error) % 2 == 0]  # fmt: skip


@pytest.mark.parametrize(("line", "buffered", "number", "code"), UNWRITTEN)
def test_a_command_that_cannot_write_says_so_in_one_line(line, buffered, number, code, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    stream = Broken(number, buffered)
    monkeypatch.setattr(sys, "stdout", stream)
    assert program.main(line.split()) == code
    assert sys.stdout is stream
    said = capsys.readouterr().err
    assert "unexpected" not in said
    lines = ["error: standard output cannot be written to: no more", "  where: standard output"]
    assert said.splitlines() == (lines if code else [])


def test_an_error_of_the_command_itself_is_not_hidden(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", Broken(errno.ENOSPC, True))
    assert program.main(["plan", "tpp=2"]) == 2
    assert "no such key" in capsys.readouterr().err


def test_what_cannot_be_written_is_dropped_and_the_first_error_kept():
    stream = output.Output(Broken(errno.ENOSPC, False))
    assert stream.write("a") == 1 and stream.write("bc") == 2
    stream.flush()
    assert stream.error is not None and stream.error.errno == errno.ENOSPC


class Terminal(io.StringIO):
    def fileno(self):
        return 1

    def isatty(self):
        return True


def test_the_log_gets_a_plain_copy_of_the_screen():
    terminal, log = Terminal(), io.StringIO()
    screen = Screen(terminal, log)
    print("\x1b[32m50 %\x1b[0m", end="\r", file=screen)
    print("done", file=screen)
    assert terminal.getvalue() == "\x1b[32m50 %\x1b[0m\rdone\n"
    assert log.getvalue() == "50 %\ndone\n"
    assert screen.isatty()


def test_a_reader_that_has_gone_ends_the_echo_and_not_the_run():
    """`parallelrun ... | head`"""
    reader, writer = os.pipe()
    with open(writer, "w", buffering=1) as pipe:
        log = io.StringIO()
        screen = Screen(pipe, log)
        os.close(reader)
        for word in ("one", "two"):
            print(word, file=screen)
        screen.flush()
        assert log.getvalue() == "one\ntwo\n"
        os.dup2(os.open(os.devnull, os.O_WRONLY), writer)  # let `pipe` be closed in peace
