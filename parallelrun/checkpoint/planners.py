"""DCP planners over parts of logical tensors: which parts a rank writes, and which ranges it reads."""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from parallelrun.errors import CheckpointError, Problem


@dataclass(frozen=True)
class LocalPart:
    """A box of the logical tensor `key` of global `shape`, which starts at `offsets`; `tensor` has the box's sizes."""

    key: str
    tensor: Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...]

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.offsets), self.tensor.shape)


class PartSavePlanner(SavePlanner):
    """Writes each rank's parts. The parts of all ranks must cover every tensor exactly once.

    required: keys of which some rank must have a part.
    """

    def __init__(self, parts: Iterable[LocalPart], required: Iterable[str] = ()):
        self._parts = {part.key: part for part in parts}
        self._required = frozenset(required)

    def set_up_planner(
        self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Do nothing: the constructor gets the parts."""

    def create_local_plan(self) -> SavePlan:
        return SavePlan([_write_item(part) for part in self._parts.values() if part.tensor.numel()])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        tensors: dict[str, TensorStorageMetadata] = {}
        for item in (item for plan in all_plans for item in plan.items):
            data = item.tensor_data
            assert data is not None
            stored = tensors.setdefault(item.index.fqn, TensorStorageMetadata(data.properties, data.size, []))
            stored.chunks.append(data.chunk)
        if absent := sorted(self._required - tensors.keys()):
            raise AssertionError(f"{len(absent)} tensors are not written by any rank: {absent[0]} is the first")
        for key, stored in tensors.items():
            held = sum(prod(chunk.sizes) for chunk in stored.chunks)
            begins = {tuple(chunk.offsets) for chunk in stored.chunks}
            if held != prod(stored.size) or len(begins) != len(stored.chunks):
                raise AssertionError(f"the ranks' parts of {key} hold {held} elements of {tuple(stored.size)}")
        return all_plans, Metadata(state_dict_metadata=dict(tensors))

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._parts[write_item.index.fqn].tensor


class PartLoadPlanner(LoadPlanner):
    """Reads the ranges of stored tensors that this rank's parts cover, whichever rank wrote them."""

    def __init__(self, parts: Iterable[LocalPart]):
        self._parts = list(parts)
        self._metadata: Metadata | None = None

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        assert self._metadata is not None
        items = []
        for number, part in enumerate(self._parts):
            stored = self._metadata.state_dict_metadata.get(part.key)
            if not isinstance(stored, TensorStorageMetadata) or tuple(stored.size) != part.shape:
                raise CheckpointError(Problem(f"{part.key} {list(part.shape)} is not in the checkpoint"))
            if stored.properties.dtype != part.tensor.dtype:  # copying would convert it silently
                what = f"{part.key} is {stored.properties.dtype} in the checkpoint, {part.tensor.dtype} here"
                raise CheckpointError(Problem(what))
            found = create_read_items_for_chunk_list(part.key, stored, [part.chunk]) if part.tensor.numel() else []
            covered = sum(prod(item.lengths) for item in found)
            if covered != part.tensor.numel():
                raise CheckpointError(Problem(f"{covered} of {part.tensor.numel()} elements of {part.key} are stored"))
            # Two parts may read the same tensor (tied copies): the number is the part that is filled.
            items += [_redirect(item, number) for item in found]
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError("our checkpoints have tensors only")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        assert read_item.dest_index.index is not None
        target = self._parts[read_item.dest_index.index].tensor.detach()
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths)):
            target = target.narrow(dim, start, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Do nothing: `resolve_tensor` has returned a view of the target."""


def _write_item(part: LocalPart) -> WriteItem:
    properties = TensorProperties(dtype=part.tensor.dtype)
    data = TensorWriteData(part.chunk, properties, torch.Size(part.shape))
    return WriteItem(MetadataIndex(part.key, part.offsets), WriteItemType.SHARD, tensor_data=data)


def _redirect(item: ReadItem, number: int) -> ReadItem:
    index = MetadataIndex(item.dest_index.fqn, item.dest_index.offset, number)
    return ReadItem(item.type, index, item.dest_offsets, item.storage_index, item.storage_offsets, item.lengths)
