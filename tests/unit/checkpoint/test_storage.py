"""The DCP storage: safetensors that others read, torch's own planners, and no pickle anywhere."""

from __future__ import annotations

import hashlib
import json
import os
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.planner import LoadPlan

from parallelrun.base.errors import CheckpointError
from parallelrun.checkpoint.files import Entry, write_safetensors
from parallelrun.checkpoint.planners import LocalPart, PartSavePlanner
from parallelrun.checkpoint.storage import SafetensorsReader, SafetensorsWriter

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

STATE = {
    "matrix": torch.randn(5, 3),
    "scalar": torch.tensor(7.0),
    "double": torch.randn(3, dtype=torch.float64),
    "half": torch.randn(3).half(),
    "brain": torch.randn(7).bfloat16(),
    "long": torch.arange(5),
    "flags": torch.tensor([True, False, True]),
    "strided": torch.randn(4, 6)[:, ::2],
    "special": torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]),
}


def save(folder, state=STATE, step=1):
    dcp.save(dict(state), storage_writer=SafetensorsWriter(folder, step, "adamw", {}, {"note": 1}), no_dist=True)
    return folder / f"step_{step}"


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def test_torchs_own_planner_saves_and_loads_through_it(tmp_path):
    path = save(tmp_path)
    loaded = {key: torch.zeros_like(value) for key, value in STATE.items()}
    dcp.load(loaded, storage_reader=SafetensorsReader(path), no_dist=True)
    assert {key: bits(value) for key, value in loaded.items()} == {key: bits(value) for key, value in STATE.items()}


def test_the_data_file_is_plain_safetensors(tmp_path):
    stored = load_file(save(tmp_path) / "rank_00000.safetensors")
    assert stored.keys() == STATE.keys()
    assert all(stored[key].dtype == STATE[key].dtype and bits(stored[key]) == bits(STATE[key]) for key in STATE)


def test_there_is_nothing_else_in_the_directory(tmp_path):
    assert sorted(os.listdir(save(tmp_path))) == ["index.json", "rank_00000.safetensors"]
    assert os.listdir(tmp_path) == ["step_1"]


def test_a_value_that_would_be_pickled_is_refused(tmp_path):
    with pytest.raises(dcp.CheckpointException, match="no tensor"):
        save(tmp_path, {**STATE, "counter": 3})
    assert os.listdir(tmp_path) == []


def test_loading_unpickles_nothing(tmp_path):
    path = save(tmp_path)
    seen, armed = [], [True]
    sys.addaudithook(lambda event, arguments: seen.append(event) if armed and event == "pickle.find_class" else None)
    dcp.load({"matrix": torch.zeros(5, 3)}, storage_reader=SafetensorsReader(path), no_dist=True)
    armed.clear()  # an audit hook cannot be removed
    assert seen == []


def test_saving_a_step_again_replaces_it_whole(tmp_path):
    save(tmp_path)
    path = save(tmp_path, {"matrix": torch.ones(2, 2)})
    assert load_file(path / "rank_00000.safetensors").keys() == {"matrix"}
    assert os.listdir(tmp_path) == ["step_1"]


def test_a_damaged_file_is_found_before_any_tensor_is_filled(tmp_path):
    path = save(tmp_path) / "rank_00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    target = {"matrix": torch.zeros(5, 3)}
    with pytest.raises(dcp.CheckpointException, match="its sha256 is"):
        dcp.load(target, storage_reader=SafetensorsReader(path.parent), no_dist=True)
    assert not target["matrix"].any()


def test_torchs_pickle_format_is_refused(tmp_path):
    dcp.save({"matrix": torch.zeros(2)}, checkpoint_id=tmp_path, no_dist=True)
    assert (tmp_path / ".metadata").exists()
    with pytest.raises(CheckpointError, match="can run code"):
        _ = SafetensorsReader(tmp_path).index


def test_a_dtype_the_format_cannot_hold_is_refused(tmp_path):
    with pytest.raises(dcp.CheckpointException, match="complex64"):
        save(tmp_path, {"wave": torch.zeros(2, dtype=torch.complex64)})


def test_a_save_tells_the_coordinator_what_is_written_and_the_others_nothing_that_grows():
    planner = PartSavePlanner([LocalPart(f"weight {n}", torch.zeros(4), (4,), (0,)) for n in range(100)])
    local = planner.create_local_plan()
    gathered = planner.decoded(json.loads(json.dumps(planner.encoded(local))))
    assert gathered.items == local.items
    plans, metadata = planner.create_global_plan([gathered])
    assert len(metadata.state_dict_metadata) == 100
    assert plans[0].items == [] and planner.finish_plan(plans[0]).items == local.items


@pytest.mark.parametrize("num_bytes", [0, 15, 16, 17, 100])
def test_the_sha256_is_that_of_the_whole_file(num_bytes, tmp_path, monkeypatch):
    """A tensor is written and hashed in blocks."""
    monkeypatch.setattr("parallelrun.checkpoint.files.BLOCK", 16)
    path, content = tmp_path / "a", memoryview(bytes(range(num_bytes)))
    size, sha256 = write_safetensors(path, [Entry("w", "U8", (num_bytes,), num_bytes)], [content])
    assert (size, sha256) == (path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())
    assert path.read_bytes().endswith(bytes(range(num_bytes)))


def test_ranks_that_see_different_checkpoints_load_none(tmp_path):
    """As on hosts that do not share the file system."""
    save(tmp_path)
    reader = SafetensorsReader(tmp_path / "step_1")
    plans = [LoadPlan([], storage_data=digest) for digest in ("a", "a", "b")]
    assert reader.prepare_global_plan(plans[:2]) == plans[:2]
    with pytest.raises(CheckpointError, match="ranks see different checkpoints under"):
        reader.prepare_global_plan(plans)
