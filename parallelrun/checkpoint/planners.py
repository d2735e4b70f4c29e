"""DCP planners over parts of logical tensors: which parts a rank writes, and which ranges it reads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from parallelrun.base.errors import CheckpointError, Problem
from parallelrun.checkpoint.storage import dtype_name


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


class PartSavePlanner(DefaultSavePlanner):
    """Writes each rank's parts. The parts of all ranks must cover every tensor exactly once.

    A rank's items go to the coordinator, and nothing comes back but the name of its file.

    required: keys of which some rank must have a part.
    """

    def __init__(self, parts: Iterable[LocalPart], required: Iterable[str] = ()):
        super().__init__()
        self._parts = {part.key: part for part in parts}
        self._required = frozenset(required)

    def create_local_plan(self) -> SavePlan:
        properties = {part.tensor.dtype: TensorProperties(dtype=part.tensor.dtype) for part in self._parts.values()}
        written = [part for part in self._parts.values() if part.tensor.numel()]
        self._items = [
            _write_item(part.key, TensorWriteData(part.chunk, properties[part.tensor.dtype], torch.Size(part.shape)))
            for part in written
        ]
        return SavePlan(self._items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Unlike torch's, fails if two ranks write one part, instead of dropping one of the two."""
        tensors: dict[str, TensorStorageMetadata] = {}
        for item in (item for plan in all_plans for item in plan.items):
            data = item.tensor_data
            assert data is not None
            stored = tensors.setdefault(item.index.fqn, TensorStorageMetadata(data.properties, data.size, []))
            stored.chunks.append(data.chunk)
        if absent := sorted(self._required - tensors.keys()):
            raise AssertionError(f"{len(absent)} tensors are not written by any rank: {absent[0]} is the first")
        for key, stored in tensors.items():
            written = sum(prod(chunk.sizes) for chunk in stored.chunks)
            begins = {tuple(chunk.offsets) for chunk in stored.chunks}
            if written != prod(stored.size) or len(begins) != len(stored.chunks):
                raise AssertionError(f"the ranks' parts of {key} hold {written} elements of {tuple(stored.size)}")
        return [SavePlan([]) for _ in all_plans], Metadata(dict(tensors))

    def encoded(self, plan: SavePlan) -> list[Any]:
        """Return as JSON what the first rank must know of a plan."""
        rows = []
        for item in plan.items:
            data = item.tensor_data
            assert data is not None
            dtype = dtype_name(data.properties.dtype)
            rows.append((item.index.fqn, data.chunk.offsets, data.chunk.sizes, dtype, data.size))
        return rows

    def decoded(self, rows: list[Any]) -> SavePlan:
        """Return the plan that a rank has encoded."""
        properties = {name: TensorProperties(dtype=getattr(torch, name)) for name in {row[3] for row in rows}}
        items = []
        for key, offsets, sizes, dtype, shape in rows:
            chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            items.append(_write_item(key, TensorWriteData(chunk, properties[dtype], torch.Size(shape))))
        return SavePlan(items)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return super().finish_plan(replace(new_plan, items=self._items))

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._parts[index.fqn].tensor


class PartLoadPlanner(DefaultLoadPlanner):
    """Reads the ranges of stored tensors that this rank's parts cover, whichever rank wrote them.

    parts: iterated after the metadata has been read.
    """

    def __init__(self, parts: Iterable[LocalPart]):
        super().__init__()
        self._wanted = parts
        self._parts: list[LocalPart] = []

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        self._parts = list(self._wanted)
        items = []
        for number, part in enumerate(self._parts):
            stored = self.metadata.state_dict_metadata.get(part.key)
            if not isinstance(stored, TensorStorageMetadata) or tuple(stored.size) != part.shape:
                raise CheckpointError(Problem(f"{part.key} {list(part.shape)} is not in the checkpoint"))
            if stored.properties.dtype != part.tensor.dtype:  # copying would convert it silently
                message = f"{part.key} is {stored.properties.dtype} in the checkpoint, {part.tensor.dtype} here"
                raise CheckpointError(Problem(message))
            ranges = create_read_items_for_chunk_list(part.key, stored, [part.chunk]) if part.tensor.numel() else []
            covered = sum(prod(item.lengths) for item in ranges)
            if covered != part.tensor.numel():
                raise CheckpointError(Problem(f"{covered} of {part.tensor.numel()} elements of {part.key} are stored"))
            # Two parts may read the same tensor (tied copies): the number is the part that is filled.
            items += [replace(item, dest_index=replace(item.dest_index, index=number)) for item in ranges]
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        assert index.index is not None
        return self._parts[index.index].tensor.detach()


def _write_item(key: str, data: TensorWriteData) -> WriteItem:
    return WriteItem(MetadataIndex(key, data.chunk.offsets), WriteItemType.SHARD, tensor_data=data)
