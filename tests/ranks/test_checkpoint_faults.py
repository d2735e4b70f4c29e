"""What goes wrong while saving and loading: crashes at every step, a full disk, damage, the wrong model."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import sys
import tempfile
import threading
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from parallelrun.base.errors import CheckpointError, EnvironmentProblem, SaveFailed
from parallelrun.checkpoint import store
from parallelrun.checkpoint.background import BackgroundWriter
from parallelrun.checkpoint.find import complete_steps
from parallelrun.planner.contract.plan import WORLD
from tests import checkpoints
from tests.checkpoints import build, parts_of, read_whole, same, truth, wrong_parts
from tests.matrix import FULL
from tests.plans import tiny_plan
from tests.pool import RanksFailed

SMALL = {"model.layers": 1, "model.hidden": 8, "model.heads": 2}
# What changes the disk. `write` is buffered: a process that dies before `fsync` leaves a torn file.
OPERATIONS = {"write", "flush", "fsync", "rename", "mkdir", "open", "close", "unlink", "rmdir"}
DIED = 77


class DieAt:
    """Ends the process just before (or after) the n-th operation on the disk that Python code makes, from now on."""

    def __init__(self, number, after=False):
        self.number, self.count, self.names = number, 0, []
        self.events = ("c_return", "c_exception") if after else ("c_call",)
        sys.setprofile(self)
        threading.setprofile(self)

    def __call__(self, frame, event, function):
        if event in self.events and function.__name__ in OPERATIONS:
            self.count += 1
            self.names.append(function.__name__)
            if self.count == self.number:
                os._exit(DIED)


def save(folder, step, plan, mesh, keep=2, beside=False):
    parameters, optimizer = parts_of(plan, mesh, step)
    if beside:
        writer = BackgroundWriter(plan, mesh.group(WORLD), mesh.device, timeout_s=60)
        writer.start(
            store.parts_of(store.TrainingState(parameters, optimizer, plan, mesh)), folder, step, {"step": step}, keep
        )
        writer.wait_for_copies()
        for parameter in parameters:  # the next update, in place, while the thread writes
            parameter.tensor.data.fill_(torch.nan)
        writer.collect()
        return
    checkpoints.save(folder, step, parameters, optimizer, {"step": step}, plan, mesh, keep)


def points(names, most_writes=8):
    """Numbers of the operations to die at: all of them, but only some of the many writes of tensors."""
    writes = [number for number, name in enumerate(names, 1) if name == "write"]
    chosen = set(writes[:: max(1, len(writes) // most_writes)])
    return [number for number, name in enumerate(names, 1) if name != "write" or number in chosen]


def crash_everywhere(root, beside):
    """Fork a saver for every point; returns (point, what a reader finds afterwards) for each."""
    take = partial(save, beside=beside)
    plan, mesh = build(SMALL)
    before, counting = root / "before", root / "counting"
    for step in (1, 2):
        save(before, step, plan, mesh)
    shutil.copytree(before, counting)
    counter = DieAt(0)
    take(counting, 3, plan, mesh)
    take(counting, 3, plan, mesh)
    sys.setprofile(None)
    threading.setprofile(None)
    whole = {1: before / "step_1", 2: before / "step_2", 3: counting / "step_3"}
    assert all(same(read_whole(path), truth(plan, salt=step)) for step, path in whole.items())
    fsync, os.fsync = os.fsync, lambda descriptor: None  # only the saver that dies needs the real one
    found = []
    for number in points(counter.names)[:: 1 if FULL or not beside else 3]:
        folder = root / f"at_{number}"
        shutil.copytree(before, folder)
        child = os.fork()
        if child == 0:
            os.fsync = fsync
            DieAt(number, after=number % 2 == 0)
            take(folder, 3, plan, mesh)
            take(folder, 3, plan, mesh)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        steps = complete_steps(folder)  # a save writes the same bytes every time
        after_crash = [step for step, path in steps.items() if contents(path) == contents(whole[step])]
        save(folder, 4, plan, mesh)
        found.append((number, counter.names[number - 1], code, after_crash, sorted(os.listdir(folder))))
    return found


def contents(path):
    return {entry.name: entry.read_bytes() for entry in path.iterdir()}


def complete(folder, plan):
    """The steps on disk whose every number is that step's."""
    steps = complete_steps(folder)
    return [step for step, path in steps.items() if same(read_whole(path), truth(plan, salt=step))]


@pytest.fixture
def quick_path(tmp_path):
    """A folder in memory where there is one: hundreds of fsyncs take their time on a disk."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.mark.parametrize("beside", [False, True], ids=["waiting", "beside_training"])
def test_a_crash_at_any_moment_of_saving_and_deleting_leaves_two_whole_checkpoints(quick_path, run_ranks, beside):
    """Saving step 3 beside 1 and 2 (1 is deleted then), saving it again, and dying at one operation after another."""
    [found] = run_ranks(1, crash_everywhere, quick_path, beside, timeout=200)
    assert len(found) >= (50 if FULL or not beside else 17)
    kinds = {name for _, name, _, _, _ in found}
    assert {"fsync", "rename", "mkdir", "write", "rmdir"} <= kinds or (beside and not FULL)
    for number, name, code, steps, names in found:
        assert code == DIED, f"operation {number} ({name}) was not reached"
        assert len(steps) >= 2 and steps[-1] in (2, 3), f"dying at operation {number} ({name}) left {steps}"
        assert names in (["step_2", "step_4"], ["step_3", "step_4"]), f"after operation {number} ({name}): {names}"


def save_and_load_without_pickle(folder):
    plan, mesh = build({**SMALL, "dp": 2, "strategy.data.kind": "zero1"})
    unpickles = mock.patch.object(dist.distributed_c10d, "_tensor_to_object", side_effect=AssertionError("unpickled"))
    with unpickles:
        save(folder, 3, plan, mesh)
        save(folder, 4, plan, mesh, beside=True)
        parameters, optimizer = parts_of(plan, mesh, 5)
        store.load(folder / "step_3", store.TrainingState(parameters, optimizer, plan, mesh))
        with pytest.raises(CheckpointError, match="step_9"):
            store.load(folder / "step_9", store.TrainingState(parameters, optimizer, plan, mesh))


def test_ranks_that_save_and_load_unpickle_nothing_that_was_sent(tmp_path, run_ranks):
    """A pickle from the network could run code."""
    run_ranks(2, save_and_load_without_pickle, tmp_path)


def save_and_die(folder, victim, number):
    plan, mesh = build({**SMALL, "dp": 2, "strategy.data.kind": "zero1"})
    for step in (1, 2):
        save(folder, step, plan, mesh)
    dist.barrier()
    if mesh.rank == victim:
        DieAt(number)
    save(folder, 3, plan, mesh)
    os._exit(DIED)  # the victim had no operation of that number: as dead, and later


@pytest.mark.parametrize("victim, number", [(0, 1), (0, 8), (1, 2), (1, 20)])
def test_a_rank_that_dies_while_saving_leaves_the_older_checkpoints(tmp_path, run_ranks, victim, number):
    with pytest.raises(RanksFailed):
        run_ranks(2, save_and_die, tmp_path, victim, number)
    plan = tiny_plan({**SMALL, "dp": 2, "strategy.data.kind": "zero1"})
    assert complete(tmp_path, plan) == [1, 2]


def save_without_room(folder):
    """Rank 1 may write 4 KiB per file only, as on a full disk; then there is room again."""
    plan, mesh = build({**SMALL, "dp": 2, "tp": 2, "strategy.data.kind": "zero1"})
    save(folder, 1, plan, mesh)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    if mesh.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, unlimited[1]))
    try:
        save(folder, 2, plan, mesh)
        said = (None, "")
    except EnvironmentProblem as error:
        said = (error.exit_code, str(error))
    dist.barrier()
    listed = sorted(os.listdir(folder))
    dist.barrier()
    if mesh.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    save(folder, 3, plan, mesh)
    return said, listed


def test_a_full_disk_on_one_rank_is_told_by_all_and_costs_nothing(tmp_path, run_ranks):
    results = run_ranks(4, save_without_room, tmp_path)
    for (code, text), listed in results:
        assert code == 3 and "step 2 could not be written" in text and "rank 1" in text
        assert os.strerror(errno.EFBIG) in text and "earlier checkpoints are untouched" in text
        assert listed == ["step_1"]
    plan = tiny_plan({**SMALL, "dp": 2, "tp": 2, "strategy.data.kind": "zero1"})
    assert complete(tmp_path, plan) == [1, 3]


def save_wrapped(folder):
    """Rank 1's disk is full, which a library tells in an exception of its own."""
    plan, mesh = build({**SMALL, "dp": 2, "strategy.data.kind": "zero1"})
    save(folder, 1, plan, mesh)

    def full(*arguments):
        error = RuntimeError("the file could not be written")
        cause = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "rank_00001.safetensors")
        raise error from cause

    try:
        with mock.patch("parallelrun.checkpoint.storage.write_safetensors", full) if mesh.rank else nullcontext():
            save(folder, 2, plan, mesh)
    except SaveFailed as error:
        return error.exit_code, str(error), error.of_another_rank
    return None


def test_a_full_disk_inside_another_exception_is_a_failed_save_on_all_ranks(tmp_path, run_ranks):
    for rank, (code, text, is_of_another) in enumerate(run_ranks(2, save_wrapped, tmp_path)):
        assert code == 3 and "step 2 could not be written" in text and is_of_another == (rank == 0)
        assert "rank 1: No space left on device" in text
    assert sorted(os.listdir(tmp_path)) == ["step_1"]


def load_damaged(folder, overrides):
    """Try every damaged copy; returns per copy (exit code, text, whether weights and state stayed as they were)."""
    plan, mesh = build({**SMALL, **overrides})
    out = {}
    for path in sorted(Path(folder).iterdir()):
        parameters, optimizer = parts_of(plan, mesh, None)
        try:
            store.load(path, store.TrainingState(parameters, optimizer, plan, mesh))
            out[path.name] = (0, "", False)
        except CheckpointError as error:
            untouched = all(torch.isnan(p.tensor).all() and not optimizer.state(p.name) for p in parameters)
            out[path.name] = (error.exit_code, str(error), untouched)
        dist.barrier()
    parameters, optimizer = parts_of(plan, mesh, None)
    store.load(Path(folder).parent / "good" / "step_1", store.TrainingState(parameters, optimizer, plan, mesh))
    return out, wrong_parts(parameters, optimizer, plan, mesh, 1)


def save_good(folder, overrides):
    plan, mesh = build({**SMALL, **overrides})
    save(folder, 1, plan, mesh)


def damaged_copies(good, folder):
    """Copies of a checkpoint, each broken in one way."""

    def flip(path, bit):
        content = bytearray(path.read_bytes())
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)

    def swap(path):
        first, second = (path / f"rank_0000{rank}.safetensors" for rank in (0, 1))
        first.rename(path / "x")
        second.rename(first)
        (path / "x").rename(second)

    last = "rank_00001.safetensors"
    size = (good / last).stat().st_size
    strategies = {
        "flip_header": lambda path: flip(path / last, 100),
        "flip_first_number": lambda path: flip(path / last, size * 8 - 8 * 200),
        "flip_last_bit": lambda path: flip(path / last, size * 8 - 1),
        "flip_index": lambda path: flip(path / "index.json", 2000),
        "truncate": lambda path: (path / last).write_bytes((path / last).read_bytes()[:-1]),
        "empty": lambda path: (path / last).write_bytes(b""),
        "delete": lambda path: (path / last).unlink(),
        "no_index": lambda path: (path / "index.json").unlink(),
        "swap": swap,
    }
    for name, strategy in strategies.items():
        shutil.copytree(good, folder / name)
        strategy(folder / name)
    return list(strategies)


def test_damage_is_refused_on_all_ranks_before_any_weight_is_touched(tmp_path, run_ranks):
    changes = {"dp": 2, "strategy.data.kind": "zero1"}
    run_ranks(2, save_good, tmp_path / "good", changes)
    names = damaged_copies(tmp_path / "good" / "step_1", tmp_path / "damaged")
    for results, wrong in run_ranks(2, load_damaged, tmp_path / "damaged", {"tp": 2}):
        assert sorted(results) == sorted(names) and wrong == []
        for name, (code, text, untouched) in results.items():
            assert code == 4 and untouched, f"{name}: exit {code}, {text}"
        assert "rank_00001.safetensors is damaged: its sha256 is" in results["flip_last_bit"][1]
        assert "bytes, expected" in results["truncate"][1] and "is missing" in results["delete"][1]
        assert "index.json is damaged" in results["flip_index"][1]


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_each_file_is_checked_however_many_ranks_read(tmp_path, run_ranks, num_ranks):
    """A checkpoint of four files, each damaged in turn, is refused on fewer ranks than files too."""
    run_ranks(4, save_good, tmp_path / "good", {"dp": 4, "strategy.data.kind": "zero1"})
    good, damaged = tmp_path / "good" / "step_1", tmp_path / "damaged"
    files = sorted(path.name for path in good.glob("rank_*"))
    assert len(files) == 4
    for name in files:
        shutil.copytree(good, damaged / name)
        content = bytearray((good / name).read_bytes())
        content[-1] ^= 1
        (damaged / name / name).write_bytes(content)
    changes = {"dp": num_ranks, "global_batch": 12, "strategy.data.kind": "zero1"}
    for results, wrong in run_ranks(num_ranks, load_damaged, damaged, changes):
        assert sorted(results) == files and wrong == []
        for name, (code, text, untouched) in results.items():
            assert code == 4 and untouched and f"{name} is damaged: its sha256 is" in text


def load_wrong(path, overrides):
    plan, mesh = build({**SMALL, **overrides})
    parameters, optimizer = parts_of(plan, mesh, None)
    try:
        store.load(path, store.TrainingState(parameters, optimizer, plan, mesh))
    except CheckpointError as error:
        return str(error), all(torch.isnan(p.tensor).all() for p in parameters)


def load_own(folder):
    return load_wrong(Path(folder) / str(dist.get_rank()) / "step_1", {"dp": 2})


def test_ranks_that_see_different_checkpoints_load_none(tmp_path, run_ranks):
    """As on hosts that do not share the file system."""
    for rank, changes in enumerate(({}, {"dp": 2, "strategy.data.kind": "zero1"})):
        run_ranks(rank + 1, save_good, tmp_path / str(rank), changes)
    for text, untouched in run_ranks(2, load_own, tmp_path):
        assert "ranks see different checkpoints under" in text and untouched
