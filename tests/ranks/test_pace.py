"""A rank that computes slowly is named, on the screen and in events.jsonl; ranks that share cores are not."""

from __future__ import annotations

import json
import time

import torch
import torch.distributed as dist

from parallelrun.base.context import WorkerContext
from parallelrun.training.loop import training_loop
from parallelrun.training.loop.build import build
from parallelrun.training.metrics.pace import WINDOW
from parallelrun.training.metrics.recorder import Recorder
from tests.plans import tiny_config, tiny_plan


def train(folder, overrides, slow):
    """Train with a sleep in every forward and backward of rank `slow`; return the last pace that this rank reported."""
    over = {"steps": WINDOW + 1, "eval.every": 0, "eval.batches": 1, "checkpoint.last": False, **overrides}
    training = build(tiny_config(over), tiny_plan(over), torch.device("cpu"))
    rank, paces = dist.get_rank(), []
    context = WorkerContext(
        rank=rank, world=training.plan.world, local_rank=rank, device=torch.device("cpu"), directory=folder,
        heartbeat=lambda step, phase: None, stop_requested=lambda: False, save_failed=lambda step: None,
        console_owner=rank == 0, report_pace=paces.append,
    )  # fmt: skip
    run = training.runner.train

    def slept(*given):
        time.sleep(0.15)
        return run(*given)

    if rank == slow:
        training.runner.train = slept
    training_loop.train(training, context, Recorder(training, context))
    return paces[-1]


def events(folder):
    path = folder / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_the_slow_rank_is_named_with_its_host(tmp_path, run_ranks, capfd):
    paces = run_ranks(3, train, tmp_path, {"dp": 3, "global_batch": 6}, 1)
    found = events(tmp_path)
    assert [(one["event"], one["rank"]) for one in found] == [("slow_rank", 1)] and found[0]["host"]
    assert paces[1].slow > 1.2 and paces[0].slow == paces[2].slow == 0.0
    assert paces[0].waiting_s > 0 and paces[0].memory_bytes > 2**20 and paces[0].tokens_per_s > 0
    assert "warning: step 20: rank 1" in capfd.readouterr().out


def test_ranks_of_equal_pace_on_few_cores_are_not_named(tmp_path, run_ranks):
    run_ranks(4, train, tmp_path, {"dp": 2, "pp": 2}, None)
    assert events(tmp_path) == []
