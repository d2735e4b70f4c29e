"""When a fork is safe."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from parallelrun.launch import turns
from tests.servants import ROOT

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


SCHEDULED = """
import ctypes, os
from parallelrun.launch import processes, turns
processes.num_cores = lambda: 4
os.nice(3)
for num_ranks in (4, 5):
    processes.take_turns(num_ranks)
    found = turns._Attributes()
    size = ctypes.sizeof(found)
    number = turns._SYSCALLS[os.uname().machine] + 1  # sched_getattr(2)
    assert ctypes.CDLL(None).syscall(number, 0, ctypes.byref(found), size, 0) == 0
    print(found.policy, found.nice, found.runtime)
"""
TURN_LENGTHS_SINCE = (6, 12)  # the version of Linux


def test_ranks_interrupt_each_other_and_take_short_turns_unless_they_share_cores():
    done = subprocess.run([sys.executable, "-c", SCHEDULED], cwd=ROOT, capture_output=True, text=True)
    alone, shared = ([int(number) for number in line.split()] for line in done.stdout.splitlines())
    version = tuple(int(number) for number in os.uname().release.split(".")[:2])
    assert alone[:2] == [os.SCHED_OTHER, 3] and alone[2] != turns.TURN_NS, done.stderr
    assert shared == [os.SCHED_BATCH, 3, turns.TURN_NS if version >= TURN_LENGTHS_SINCE else 0], done.stderr
