"""The pool of ranks that every test in this folder stands on."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

from parallelrun.distributed import torch_private
from parallelrun.distributed.comm.counter import CommunicationCounter
from parallelrun.planner.resolve.resolve_config import resolve
from parallelrun.training.loop import step
from parallelrun.training.metrics import first_steps
from parallelrun.training.verify.checked import checked_config
from tests.cli.launcher import survivors
from tests.parity import _cell, _reference, _settings
from tests.plans import tiny_config
from tests.pool import RanksFailed, run_ranks
from tests.servants import ROOT


def summed(scale: float) -> torch.Tensor:
    tensor = torch.full((3,), scale * (dist.get_rank() + 1), dtype=torch.float64)
    dist.all_reduce(tensor)
    return tensor


def one_rank_raises() -> None:
    if dist.get_rank() == 2:
        raise ValueError("the culprit")
    dist.barrier()


def one_rank_is_killed() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def one_rank_exits() -> None:
    if dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()


def one_rank_sleeps() -> None:
    if dist.get_rank() == 3:
        time.sleep(100)
    dist.barrier()


def fast_and_slow() -> int:
    time.sleep(0.3 * dist.get_rank())
    return os.getpid()


def proves_a_plan() -> int:
    """What most calls do: build a training, count and observe its steps."""
    overrides = {"dp": 2, "verify.steps": 1}
    _cell(
        overrides,
        resolve(checked_config(tiny_config(overrides))),
        str(_reference(str(_settings(overrides)))),
        None,
        None,
        "",
    )
    return os.getpid()


def own_pid() -> int:
    return os.getpid()


def replaces_a_function() -> int:
    step.train_step = lambda *args: None
    return os.getpid()


def replaces_a_constant() -> int:
    first_steps.COUNTED_STEP = 3
    return os.getpid()


def replaces_a_method() -> int:
    CommunicationCounter.rows = lambda self: []
    return os.getpid()


def replaces_a_constructor() -> int:
    CommunicationCounter.__init__ = lambda self, mesh: None
    return os.getpid()


def changes_a_default() -> int:
    torch.set_default_dtype(torch.float64)
    return os.getpid()


def leaves_traces(name: str) -> tuple:
    """What a call sees of the calls before it, which then leaves as much as it can."""
    store = torch_private.default_store()
    seen = (os.getcwd(), dict(os.environ), torch.get_num_threads(), store.check(["key"]))
    seen += (torch.rand(1).item(), random.random(), np.random.random())
    dist.barrier()
    store.set("key", name)
    os.environ["PARALLELRUN_TEST"] = name
    os.chdir("/")
    torch.set_num_threads(2)
    dist.new_group([0])
    return seen


def has_imported(name: str) -> bool:
    return name in sys.modules


def prints() -> None:
    print(f"hello from {dist.get_rank()}")


def test_a_warm_call_of_four_ranks_is_quick():
    run_ranks(4, summed, 1.0)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        run_ranks(4, summed, 1.0)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.5, times  # 0.06 s on idle cores; bound leaves room for a busy machine


def test_an_exception_names_its_rank_first_and_shows_its_traceback():
    with pytest.raises(RanksFailed) as caught:
        run_ranks(4, one_rank_raises)
    first = caught.value.failures[0]
    assert (first.rank, first.kind, first.message) == (2, "ValueError", "the culprit")
    assert "in one_rank_raises" in str(caught.value).split("rank ")[1]
    assert isinstance(first.exception, ValueError)


@pytest.mark.parametrize(("end", "told"), [(one_rank_is_killed, "SIGKILL"), (one_rank_exits, "exit 3")])
def test_a_rank_that_ends_is_named_before_its_victims(end, told):
    with pytest.raises(RanksFailed, match=rf"^rank 1: {told}"):
        run_ranks(4, end)


def test_a_hang_ends_at_the_timeout_with_the_stacks_of_all_ranks():
    start = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        run_ranks(4, one_rank_sleeps, timeout=2)
    assert time.monotonic() - start < 8
    assert [failure.rank for failure in caught.value.failures] == [0, 1, 2, 3]
    assert all("in one_rank_sleeps" in failure.traceback for failure in caught.value.failures)


def test_a_failure_does_not_poison_the_next_call():
    with pytest.raises(RanksFailed):
        run_ranks(2, one_rank_is_killed)
    assert torch.equal(run_ranks(2, summed, 1.0)[0], torch.full((3,), 3.0, dtype=torch.float64))


def test_ranks_answer_the_next_call_of_the_same_world():
    assert run_ranks(3, fast_and_slow) == run_ranks(3, fast_and_slow)


def test_ranks_that_have_proved_a_plan_answer_the_next_call():
    assert run_ranks(2, proves_a_plan) == run_ranks(2, proves_a_plan)


@pytest.mark.parametrize(
    "change",
    [replaces_a_function, replaces_a_constant, replaces_a_method, replaces_a_constructor, changes_a_default],
)
def test_ranks_that_a_call_has_changed_answer_no_other(change):
    pids = run_ranks(2, change)
    again = run_ranks(2, own_pid)
    assert not set(pids) & set(again)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_no_rank_of_a_fresh_call_is_used_twice():
    before = run_ranks(2, own_pid)
    fresh = run_ranks(2, own_pid, fresh=True)
    assert not set(before) & set(fresh)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in fresh)
    assert run_ranks(2, own_pid) == before


def test_ranks_serve_one_test_file(monkeypatch):
    """What a file leaves unfinished in a process group, as a collective that not every rank issues, meets no other."""
    before = run_ranks(2, own_pid)
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "tests/ranks/test_another.py::test (call)")
    assert not set(before) & set(run_ranks(2, own_pid))
    assert not any(os.path.exists(f"/proc/{pid}") for pid in before)


def test_a_call_finds_the_process_as_the_first_one_did():
    assert run_ranks(2, leaves_traces, "first") == run_ranks(2, leaves_traces, "second")


def test_ranks_find_the_modules_that_a_call_asks_for():
    assert run_ranks(2, has_imported, "tabnanny") == [False, False]
    assert run_ranks(2, has_imported, "tabnanny", imports=("tabnanny",)) == [True, True]


@pytest.mark.slow
def test_no_rank_survives_the_session():
    code = "from os import getpid\nfrom tests.pool import run_ranks\nprint(*run_ranks(2, getpid))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    pids = done.stdout.split()
    assert len(pids) == 2
    assert not survivors([int(pid) for pid in pids], within_s=5.0)


def test_what_ranks_print_is_shown(capsys):
    run_ranks(2, prints)
    assert capsys.readouterr().out.splitlines() == ["[rank 0] hello from 0", "[rank 1] hello from 1"]
