"""The files of a checkpoint: safetensors that others read, and no pickle anywhere."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from parallelrun.base.errors import CheckpointError
from parallelrun.checkpoint.files import Entry, write_safetensors
from parallelrun.checkpoint.find import open_complete
from parallelrun.checkpoint.index import Index, stored_tensors
from parallelrun.checkpoint.schema import read_index
from parallelrun.checkpoint.storage import LocalPart, create_aside, fill_parts, publish, write_part_file

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
FILE = "rank_00000.safetensors"


def parts_of(state):
    return [LocalPart(key, value, tuple(value.shape), (0,) * value.dim()) for key, value in state.items()]


def save(folder: Path, state=STATE) -> Path:
    target, parts = folder / "step_1", parts_of(state)
    aside = create_aside(target)
    files = {FILE: write_part_file(aside / FILE, parts)}
    publish(
        Index(1, "adamw", {}, {}, stored_tensors([[part.described for part in parts]], [FILE]), files), aside, target
    )
    return target


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def test_the_data_file_is_plain_safetensors_and_is_read_without_unpickling(tmp_path):
    path = save(tmp_path)
    assert sorted(os.listdir(path)) == ["index.json", FILE] and os.listdir(tmp_path) == ["step_1"]
    seen, armed = [], [True]
    sys.addaudithook(lambda event, arguments: seen.append(event) if armed and event == "pickle.find_class" else None)
    loaded = {key: torch.zeros_like(value) for key, value in STATE.items()}
    fill_parts(read_index(path), path, parts_of(loaded))
    armed.clear()  # an audit hook cannot be removed
    assert seen == []
    for tensors in (load_file(path / FILE), loaded):
        assert tensors.keys() == STATE.keys()
        assert all(tensors[key].dtype == STATE[key].dtype and bits(tensors[key]) == bits(STATE[key]) for key in STATE)


@pytest.mark.parametrize("wanted", [torch.zeros(5, 4), torch.zeros(5, 3).half()], ids=["shape", "dtype"])
def test_a_tensor_of_another_shape_or_dtype_is_not_converted(wanted, tmp_path):
    path = save(tmp_path)
    with pytest.raises(CheckpointError, match="is not in the checkpoint"):
        fill_parts(read_index(path), path, parts_of({"matrix": wanted}))


def test_saving_a_step_again_replaces_it_whole(tmp_path):
    save(tmp_path)
    path = save(tmp_path, {"matrix": torch.ones(2, 2)})
    assert load_file(path / FILE).keys() == {"matrix"}
    assert os.listdir(tmp_path) == ["step_1"]


def test_torchs_pickle_format_is_refused(tmp_path):
    dcp.save({"matrix": torch.zeros(2)}, checkpoint_id=tmp_path, no_dist=True)
    assert (tmp_path / ".metadata").exists()
    with pytest.raises(CheckpointError, match="can run code"):
        open_complete(tmp_path)


@pytest.mark.parametrize("num_bytes", [0, 15, 16, 17, 100])
def test_the_sha256_is_that_of_the_whole_file(num_bytes, tmp_path, monkeypatch):
    """A tensor is written and hashed in blocks."""
    monkeypatch.setattr("parallelrun.checkpoint.files.BLOCK", 16)
    path, content = tmp_path / "a", memoryview(bytes(range(num_bytes)))
    size, sha256 = write_safetensors(path, [Entry("w", "U8", (num_bytes,), num_bytes)], [content])
    assert (size, sha256) == (path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())
    assert path.read_bytes().endswith(bytes(range(num_bytes)))
