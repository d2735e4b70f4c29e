"""Standard output that is full, closed, or no longer read."""

from __future__ import annotations

import errno
import io
import sys

import pytest

from parallelrun.cli import main as program
from parallelrun.launch import output


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


@pytest.mark.parametrize("buffered", [False, True])
@pytest.mark.parametrize("line", ["ls", "plan tp=2", "plan --json -m tp=1,2", "--help", "show quickstart"])
@pytest.mark.parametrize(("number", "code"), [(errno.EPIPE, 0), (errno.ENOSPC, 3)])
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


def test_a_closed_stdout_is_no_error(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", None)
    assert program.main(["plan", "--json", "tp=2"]) == 0 and capsys.readouterr().err == ""


def test_an_error_of_the_command_itself_is_not_hidden(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", Broken(errno.ENOSPC, True))
    assert program.main(["plan", "tpp=2"]) == 2
    assert "no such key" in capsys.readouterr().err


def test_what_is_written_after_the_first_failure_is_dropped():
    stream = output.Output(Broken(errno.ENOSPC, False))
    assert stream.write("a") == 1 and stream.write("bc") == 2
    stream.flush()
    assert stream.error is not None and stream.error.errno == errno.ENOSPC
