"""When a fork is safe."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from parallelrun.base.context import WorkerContext
from parallelrun.distributed.mesh import Mesh
from parallelrun.launch.host.job import WORKER, Job
from parallelrun.launch.ranks import processes
from parallelrun.launch.ranks.rank import find_worker
from parallelrun.models.network import Network
from parallelrun.training.loop.build import build_model_parts
from tests.plans import tiny_config, tiny_plan
from tests.servants import ROOT

PRELUDE = """
import threading, numpy
from parallelrun.launch.ranks.processes import method_for, num_threads
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


NATIVE = """
import os, threading
from pathlib import Path
from parallelrun.launch.ranks.processes import method_for
from tests.plans import tiny_plan
thread = threading.Thread(target=threading.Event().wait, daemon=True)
thread.start()
for name in ("jemalloc_bg_thd", "arrow-worker"):
    Path(f"/proc/self/task/{thread.native_id}/comm").write_text(name)
    print(method_for(tiny_plan(dp=2)))
"""


def test_the_thread_of_jemalloc_which_pyarrow_and_so_optuna_starts_does_not_forbid_a_fork():
    """Each trial of a search would import torch once a rank otherwise."""
    done = subprocess.run([sys.executable, "-c", NATIVE], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.stdout.split() == ["fork", "exec"], done.stderr


SCHEDULED = """
import os
from parallelrun.launch.ranks import processes
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


COMPILER = "parallelrun.distributed.torch_private:import_compiler"


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


def test_forked_ranks_keep_parts_of_one_network_that_the_launcher_has_built(monkeypatch):
    def network_of(**keys: object) -> Network | None:
        config = replace(tiny_config(), **keys)
        return processes.prepared(Job(config, tiny_plan(device=config.device), Path())).prepared

    network = network_of()
    assert network is not None and all(one.device.type == "meta" for one in network.parameters())
    assert {name for name, _ in network.named_parameters()} == set(tiny_plan().spec.parameters)
    assert network_of(verb="verify") is None and network_of(device="cuda") is None
    assert network_of(model=replace(tiny_config().model, source="./net.py:build")) is None
    parts: list[Network] = []
    monkeypatch.setattr("parallelrun.launch.ranks.worker.build", lambda *arguments: parts.append(arguments[3]))
    monkeypatch.setattr("parallelrun.launch.ranks.worker._train", lambda *_: 0)
    context = WorkerContext(0, 1, 0, torch.device("cpu"), Path(), print, bool, print, True, prepared=network)
    assert find_worker(WORKER)(tiny_config(), tiny_plan(), context) == 0 and parts == [network]
    monkeypatch.setattr("parallelrun.training.loop.build.registry", None)  # builds no other
    mesh = Mesh(tiny_plan().mesh, 0, torch.device("cpu"))
    monkeypatch.setattr("parallelrun.training.loop.build._parallelize", lambda *_: None)
    assert build_model_parts(tiny_config(), tiny_plan(), mesh, network)[0].block_names == network.block_names


def test_a_worker_that_cannot_prepare_fails_in_its_ranks():
    job = Job(tiny_config(), tiny_plan(), Path(), "no.such.module:run")
    assert processes.prepared(job) is job
