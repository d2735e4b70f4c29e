"""When a fork is safe."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from parallelrun.launch import processes
from tests.plans import tiny_config, tiny_plan
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
import os
from parallelrun.launch import processes
processes.num_cores = lambda: 4
policies = []
for num_ranks in (4, 5):
    processes.take_turns(num_ranks)
    policies.append(os.sched_getscheduler(0))
print(policies == [os.SCHED_OTHER, os.SCHED_BATCH])
"""


def test_ranks_interrupt_each_other_unless_they_share_cores():
    done = subprocess.run([sys.executable, "-c", SCHEDULED], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "True", done.stderr


COMPILER = "parallelrun.torch_private:import_compiler"


@pytest.mark.parametrize(
    ("asked", "needed"),
    [
        ({"dp": 2}, set()),
        ({"dp": 2, "compile": True}, {COMPILER}),
        ({"dp": 2, "recompute": "full"}, {COMPILER}),
        ({"pp": 2}, set()),
    ],
)
def test_before_the_fork_a_launcher_imports_what_its_plan_needs_and_nothing_else(asked, needed):
    found = processes.modules(tiny_config(asked), tiny_plan(asked))
    assert {COMPILER} & set(found) == needed
    assert any(name.endswith("tensor.megatron.runtime") for name in found)


def test_ranks_that_are_not_forked_import_for_themselves():
    assert not processes.modules(tiny_config(device="cuda"), tiny_plan(device="cuda"))
