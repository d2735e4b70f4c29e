"""Checkpoints in the memory of several hosts: each host has its own files and those of the one before it; what a host
has lost is fetched from the others. Folders stand for the hosts."""

from __future__ import annotations

import json
import os
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

from parallelrun.checkpoint import held, store
from parallelrun.checkpoint import memory as memory_module
from parallelrun.checkpoint.held import keep_only
from parallelrun.config.schema import PrecisionConfig
from parallelrun.context import WorkerContext
from parallelrun.errors import CheckpointError
from parallelrun.train import checkpointing
from parallelrun.train.build import build
from parallelrun.train.memory_checkpoints import MemoryCheckpoints
from parallelrun.train.schedules import LossScaler
from parallelrun.train.step import train_step
from tests.plans import tiny_config, tiny_plan

FSDP = {"dp": 4, "strategy.data.kind": "fsdp", "model.layers": 1, "steps": 4, "checkpoint.memory_every": 2,
        "restarts": 1}  # fmt: skip
HOSTS = ("a", "b", "b", "c")  # of each rank
FILES = [f"rank_{rank:05d}.safetensors" for rank in range(4)]


def made(folder: Path, hosts, changes):
    rank = torch.distributed.get_rank()
    training = build(tiny_config(changes), tiny_plan(changes), torch.device("cpu"))
    context = WorkerContext(
        rank, 4, 0, torch.device("cpu"), folder, lambda *_: None, lambda: False, lambda step: None,
        console_owner=rank == 0, memory=folder / hosts[rank],
    )  # fmt: skip
    return training, MemoryCheckpoints(training, context), context


def state(training) -> list[torch.Tensor]:
    """This rank's weights and optimizer state."""
    mesh, kept = training.mesh, training.data.kept
    found = store.parts_of(training.held, training.optimizer, training.plan, mesh, kept)
    return [part.tensor.clone() for part in found]


def save(folder, hosts, full=""):
    """Train 4 steps, saving after 2 and 4. full: the host whose memory is too small for step 4."""
    training, memory, context = made(folder, hosts, FSDP)
    scaler = LossScaler(PrecisionConfig(), scaled=False)
    for step in range(1, 5):
        train_step(training, step, 0.01, scaler)
        if full and step == 4 and hosts[context.rank] == full:
            shutil.rmtree(context.memory, ignore_errors=True)
            context.memory.write_text("")  # where no directory can be made
        parts = partial(checkpointing._parts, training)
        memory.after_step(step, parts, partial(checkpointing._extra, training, scaler, step))
        memory.finish()
    return memory.num_saved, state(training)


def save_but_for_the_index(folder, hosts):
    """As `save`, but the host `b` has no memory left for the index of step 4."""
    publish = memory_module._publish

    def fail(writer, index):
        is_full = writer.step == 4 and writer.directory.name == "b"
        return OSError(28, "No space left on device") if is_full else publish(writer, index)

    memory_module._publish = fail
    try:
        return save(folder, hosts)
    finally:
        memory_module._publish = publish


def load(folder, hosts, step):
    """Load the step; return the state, or the error. Each rank has files of its host alone."""
    rank = torch.distributed.get_rank()
    changes = {**FSDP, "resume": str(folder / hosts[rank] / f"step_{step}")}
    training, memory, _ = made(folder, hosts, changes)
    try:
        checkpointing.load(training, LossScaler(PrecisionConfig(), scaled=False), memory)
    except CheckpointError as error:
        return str(error)
    return state(training)


def make(folder: Path, hosts) -> None:
    for name in set(hosts):
        (folder / name).mkdir(exist_ok=True)


def files(folder: Path) -> dict[str, list[str]]:
    return {host.name: sorted(path.name for path in host.glob("step_4/rank*")) for host in sorted(folder.iterdir())}


def test_files_are_on_two_hosts_and_a_lost_host_is_made_up_for(tmp_path, run_ranks):
    make(tmp_path, HOSTS)
    saved = run_ranks(4, save, tmp_path, HOSTS)
    assert [count for count, _ in saved] == [2] * 4
    assert files(tmp_path) == {"a": [FILES[0], FILES[3]], "b": FILES[:3], "c": FILES[1:]}
    assert {path.name for host in tmp_path.iterdir() for path in host.iterdir()} == {"step_4"}
    shutil.rmtree(tmp_path / "b")
    now = ("a", "d", "c", "c")  # `d` has never had a rank of this run
    make(tmp_path, now)
    found = held.newest(held.held(tmp_path / host) for host in sorted(set(now)))
    assert found is not None and found[0] == 4
    for host in set(now):
        keep_only(tmp_path / host, *found)
    loaded = run_ranks(4, load, tmp_path, now, 4)
    for (_, before), after in zip(saved, loaded):
        assert len(before) == len(after) > 4 and all(map(torch.equal, before, after))


def test_a_flipped_bit_in_a_fetched_file_is_found_by_all_ranks(tmp_path, run_ranks):
    make(tmp_path, HOSTS)
    run_ranks(4, save, tmp_path, HOSTS)
    for host in "bc":  # both copies of rank 1's file
        path = tmp_path / host / "step_4" / FILES[1]
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    errors = run_ranks(4, load, tmp_path, HOSTS, 4)
    assert all(isinstance(error, str) and f"{FILES[1]}" in error and "sha256" in error for error in errors)


def test_a_memory_that_is_too_small_leaves_the_older_checkpoint_and_training_goes_on(tmp_path, run_ranks):
    make(tmp_path, HOSTS)
    saved = run_ranks(4, save, tmp_path, HOSTS, "b")
    assert [count for count, _ in saved] == [1] * 4
    assert os.listdir(tmp_path / "a") == ["step_2"] and os.listdir(tmp_path / "c") == ["step_2"]


def test_no_host_removes_a_checkpoint_before_all_have_the_next_one(tmp_path, run_ranks):
    make(tmp_path, HOSTS)
    saved = run_ranks(4, save_but_for_the_index, tmp_path, HOSTS)
    assert [count for count, _ in saved] == [1] * 4
    assert all((tmp_path / host / "step_2").exists() for host in "abc")


@pytest.mark.parametrize(("lost", "step"), [("", 4), ("a", 4), ("ab", None)])
def test_the_newest_checkpoint_is_that_of_which_all_files_are_left(tmp_path, lost, step):
    """Without a host there is a copy of all its files; without two neighbours there is none, of either step."""
    index = {"files": FILES}
    own = {"a": [0, 2], "b": [1, 0], "c": [2, 1]}
    hosts = [
        {number: held.Held(json.dumps(index), [FILES[i] for i in has], [FILES[i] for i in range(3) if i not in has])
         for number in (2, 4)}
        for name, has in own.items() if name not in lost
    ]  # fmt: skip
    found = held.newest(hosts)
    assert (found[0] if found else None) == step
    assert held.newest([{}, {}]) is None
