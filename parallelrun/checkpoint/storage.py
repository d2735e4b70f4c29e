"""Storage for torch.distributed.checkpoint: a safetensors file per rank and one JSON index, without pickle.

Works with torch's own planners too: `dcp.load(state, storage_reader=SafetensorsReader(path))`.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from parallelrun.base.errors import CheckpointError, EnvironmentProblem, Problem
from parallelrun.checkpoint.files import Entry, sync, write_bytes, write_safetensors
from parallelrun.checkpoint.find import refuse_pickle, step_name
from parallelrun.checkpoint.index import (
    DTYPES,
    INDEX_FILE,
    Index,
    StoredPart,
    StoredTensor,
    encode,
    missing_files,
    verify_file,
)
from parallelrun.checkpoint.schema import check_header, read_index


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class SafetensorsWriter(StorageWriter):
    """Writes `<directory>/step_<n>` under a hidden name, the index last, and renames it when every rank has finished.

    A crash or an error at any moment leaves older checkpoints unchanged. All hosts must share the file system.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        step: int,
        optimizer: str,
        plan: Mapping[str, Any],
        extra: Mapping[str, Any],
    ):
        self.directory = Path(os.path.abspath(directory))
        self.step, self.target = step, self.directory / step_name(step)
        self._index = Index(step, optimizer, plan, extra, {}, {})
        self._aside: Path | None = None  # the hidden directory, on the coordinator

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: the constructor gets the directory."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: all ranks write alike."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                raise TypeError(f"{item.index.fqn} is no tensor; put other values into `extra`")
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Coordinator: create the hidden directory, and tell each rank its file."""
        self._aside = self.directory / f".{self.target.name}.tmp-{secrets.token_hex(4)}"
        self._aside.mkdir(parents=True)
        return [
            replace(plan, storage_data=f"{self._aside.name}/rank_{rank:05d}.safetensors")
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        done: Future[list[WriteResult]] = Future()
        if not plan.items:
            done.set_result([])
            return done
        path = self.directory / plan.storage_data
        path.parent.mkdir(exist_ok=True)  # on a shared file system another host may not see it yet
        # Wide elements first: every tensor then starts at a multiple of its element size.
        items = sorted(plan.items, key=lambda item: (-_dtype(item).itemsize, item.index.fqn))
        entries = [_entry(item) for item in items]
        if len({entry.key for entry in entries}) != len(entries):
            raise ValueError("a rank writes two parts of one tensor")
        written = write_safetensors(path, entries, (tensor_bytes(planner.resolve_data(item)) for item in items))
        note = (path.name, written)
        done.set_result([WriteResult(item.index, entry.num_bytes, note) for item, entry in zip(items, entries)])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Coordinator: write the index, then rename. Only the rename makes the checkpoint visible."""
        assert self._aside is not None, "finish before prepare_global_plan"
        index = self._complete_index(metadata, results)
        if wrong := missing_files(index, self._aside):
            raise EnvironmentProblem(
                Problem(f"{wrong[0]}: checkpoints must be on a file system that all hosts share", where="runs")
            )
        self._publish(self._aside, encode(index))

    def _complete_index(self, metadata: Metadata, results: list[list[WriteResult]]) -> Index:
        """Return the index of what all ranks have written."""
        part_file: dict[MetadataIndex, str] = {}
        files: dict[str, tuple[int, str]] = {}
        for result in (result for rank_results in results for result in rank_results):
            name, files[name] = result.storage_data
            part_file[result.index] = name
        return replace(self._index, tensors=_stored_tensors(metadata, part_file), files=dict(sorted(files.items())))

    def _publish(self, aside: Path, index: bytes) -> None:
        """Write the index, and make the checkpoint visible. Raises OSError."""
        write_bytes(aside / INDEX_FILE, index)
        sync(aside)
        replaced = None
        if self.target.exists():
            replaced = self.directory / f".{self.target.name}.old-{secrets.token_hex(4)}"
            os.rename(self.target, replaced)
        os.rename(aside, self.target)
        sync(self.directory)
        if replaced is not None:
            shutil.rmtree(replaced, ignore_errors=True)

    def discard(self) -> None:
        """Coordinator: delete the hidden directory if the save has failed."""
        if self._aside is not None:
            shutil.rmtree(self._aside, ignore_errors=True)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class SafetensorsReader(StorageReader):
    """Reads a checkpoint. The sha256 of each file is checked by one rank before any rank reads a tensor."""

    def __init__(self, path: str | os.PathLike[str], rank: int = 0, world: int = 1):
        self.path = Path(os.path.abspath(path))
        self._rank, self._world = rank, world
        self._index: Index | None = None
        self._failure: CheckpointError | None = None
        self._file_of: dict[MetadataIndex, str] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: the constructor gets the directory."""

    @property
    def index(self) -> Index:
        """The checked index. Raises CheckpointError."""
        if self._index is None:
            refuse_pickle(self.path)
            self._index = read_index(self.path)
        return self._index

    def read_metadata(self, *args: Any) -> Metadata:
        """Return the index as DCP metadata.

        `set_up_storage_reader` raises a failure that happens here, because DCP would log tracebacks.
        """
        try:
            tensors = self.index.tensors
        except CheckpointError as error:
            self._failure, tensors = error, {}
        state: dict[str, Any] = {}
        for key, tensor in tensors.items():
            chunks = [ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.sizes)) for p in tensor.parts]
            properties = TensorProperties(dtype=getattr(torch, tensor.dtype))
            state[key] = TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
            self._file_of |= {MetadataIndex(key, part.offsets): part.file for part in tensor.parts}
        return Metadata(state_dict_metadata=state)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if self._failure is not None:
            raise self._failure

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Verify this rank's share of the files. DCP reads no tensor until all ranks have returned."""
        for name in sorted(self.index.files)[self._rank :: self._world]:
            verify_file(self.index, self.path, name)
            check_header(self.index, self.path, name)
        return replace(plan, storage_data=self.index.digest)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        if len({plan.storage_data for plan in plans}) > 1:
            raise CheckpointError(Problem(f"ranks see different checkpoints under {self.path}", where="resume"))
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file = defaultdict(list)
        for item in plan.items:
            offset = item.storage_index.offset
            by_file[self._file_of[MetadataIndex(item.storage_index.fqn, offset or ())]].append(item)
        for name, items in by_file.items():
            with safe_open(self.path / name, framework="pt", device="cpu") as file:
                for item in items:
                    target = planner.resolve_tensor(item).detach()
                    box = tuple(slice(start, start + n) for start, n in zip(item.storage_offsets, item.lengths))
                    key = item.storage_index.fqn
                    source = file.get_slice(key)[box] if box else file.get_tensor(key)  # reads no other bytes
                    target.copy_(source.reshape(target.shape))
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _stored_tensors(metadata: Metadata, file_of: Mapping[MetadataIndex, str]) -> dict[str, StoredTensor]:
    tensors = {}
    for key, stored in metadata.state_dict_metadata.items():
        assert isinstance(stored, TensorStorageMetadata)
        parts = []
        for chunk in stored.chunks:
            name = file_of.get(MetadataIndex(key, chunk.offsets)) or file_of[MetadataIndex(key)]
            parts.append(StoredPart(tuple(chunk.offsets), tuple(chunk.sizes), name))
        tensors[key] = StoredTensor(dtype_name(stored.properties.dtype), tuple(stored.size), tuple(parts))
    return tensors


def _dtype(item: WriteItem) -> torch.dtype:
    assert item.tensor_data is not None
    return item.tensor_data.properties.dtype


def _entry(item: WriteItem) -> Entry:
    assert item.tensor_data is not None
    dtype, sizes = _dtype(item), item.tensor_data.chunk.sizes
    if dtype_name(dtype) not in DTYPES:
        raise TypeError(f"{item.index.fqn} has dtype {dtype}, which safetensors files do not hold")
    return Entry(item.index.fqn, DTYPES[dtype_name(dtype)][0], tuple(sizes), sizes.numel() * dtype.itemsize)


def tensor_bytes(tensor: Any) -> memoryview:
    """The elements of a tensor in C order, as a file holds them."""
    flat = tensor.detach().contiguous().cpu().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())
