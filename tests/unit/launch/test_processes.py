"""When a fork is safe, and where a rank's output goes."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest

from parallelrun.launch.output import Screen
from tests.pool import ROOT

PRELUDE = """
import threading, numpy
from parallelrun.launch.processes import method_for, num_threads
from tests.plans import tiny_plan
"""


@pytest.mark.parametrize(
    ("code", "method"),
    [
        ("a = numpy.ones((300, 300)); a @ a", "fork"),  # OpenBLAS has threads now, and ends them before a fork
        ("threading.Thread(target=threading.Event().wait, daemon=True).start()", "exec"),
    ],
)
def test_a_launcher_with_threads_that_do_not_survive_a_fork_execs_its_ranks(code, method):
    answer = "print(num_threads() > 1, method_for(tiny_plan(dp=2)), method_for(tiny_plan(device='cuda')))"
    environ = {k: v for k, v in os.environ.items() if not k.endswith("_NUM_THREADS")}
    environ |= {"OPENBLAS_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", f"{PRELUDE}\n{code}\n{answer}"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environ,
        timeout=60,
    )
    assert done.stdout.split() == ["True", method, "exec"], done.stderr


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
