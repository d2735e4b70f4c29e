"""Moves weights and optimizer state between the ranks of two plans of one world, without a disk.

Every rank tells which boxes of logical tensors it has under the old plan and needs under the new one. From that, all
ranks compute the same list of pieces, and exchange them by all-to-all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from parallelrun.checkpoint.index import Index, StoredPart, StoredTensor, describe_plan
from parallelrun.checkpoint.planners import LocalPart
from parallelrun.checkpoint.storage import dtype_name
from parallelrun.checkpoint.store import parts_wanted
from parallelrun.distributed import comm
from parallelrun.distributed.mesh import Group, Mesh
from parallelrun.models.optimizer import Optimizer
from parallelrun.planner.contract.parameters import LocalParameter
from parallelrun.planner.contract.plan import WORLD, Plan

PURPOSE = "reshape"
ROUND_BYTES = 2**28  # that all ranks together exchange at once: it bounds the buffers


@dataclass(frozen=True)
class Box:
    """[offset, offset + size) per dim of the logical tensor `key`, which is part `number` of a rank."""

    key: str
    number: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def overlap(self, other: Box) -> tuple[tuple[int, int], ...] | None:
        """Return the common [start, stop) per dim, or None."""
        ends = [
            (max(a, b), min(a + n, b + m))
            for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        ]
        return tuple(ends) if all(start < stop for start, stop in ends) else None

    def slices(self, ends: tuple[tuple[int, int], ...]) -> tuple[slice, ...]:
        """Return where [start, stop) per dim is in this box."""
        return tuple(slice(start - o, stop - o) for (start, stop), o in zip(ends, self.offsets))


@dataclass(frozen=True)
class MovedRange:
    """The range `ends` of a tensor, from a box of rank `source` to one of rank `target`."""

    source: int
    target: int
    held: Box
    wanted: Box
    ends: tuple[tuple[int, int], ...]

    @property
    def numel(self) -> int:
        return prod(stop - start for start, stop in self.ends)


def move(
    parts: Sequence[LocalPart],
    kinds: Sequence[str],
    parameters: Sequence[LocalParameter],
    optimizer: Optimizer,
    plan: Plan,
    mesh: Mesh,
    kept: Mapping[str, Sequence[LocalParameter]],
) -> int:
    """Fill the parameters and the optimizer's state of the new `plan`; return the bytes that all ranks have exchanged.

    parts: what this rank holds under the old plan (`store.parts_of`); the ranks' parts together have every element
    once. kinds: of the old strategy's additional tensors (`kept`). The other arguments belong to the new plan.
    Collective over the world, which both plans share. The caller must then call `DataRuntime.finish_update`.
    """
    local = comm.gather_json([_described(part) for part in parts], mesh)
    index = _index(local, kinds, plan)
    wanted, states = parts_wanted(index, parameters, plan, mesh, kept)
    needed = comm.gather_json([_described(part) for part in wanted], mesh)
    num_bytes = 0
    for dtype, pieces in _rounds(_pieces(local, needed), index):
        _exchange(pieces, dtype, parts, wanted, mesh)
        num_bytes += sum(piece.numel for piece in pieces if piece.source != piece.target) * dtype.itemsize
    for parameter, state in states:
        optimizer.load_state(parameter.name, state)
    return num_bytes


def _described(part: LocalPart) -> list[Any]:
    return [part.key, dtype_name(part.tensor.dtype), part.shape, part.offsets, tuple(part.tensor.shape)]


def _index(parts_by_rank: list[list[Any]], kinds: Sequence[str], plan: Plan) -> Index:
    """Describe what all ranks hold as a checkpoint, whose files are the ranks."""
    tensors: dict[str, StoredTensor] = {}
    for rank, parts in enumerate(parts_by_rank):
        for key, dtype, shape, offsets, sizes in parts:
            before = tensors[key].parts if key in tensors else ()
            part = StoredPart(tuple(offsets), tuple(sizes), str(rank))
            tensors[key] = StoredTensor(dtype, tuple(shape), (*before, part))
    return Index(0, plan.optimizer, describe_plan(plan), {"kept": list(kinds)}, tensors, {})


def _boxes(described: list[Any]) -> Iterator[Box]:
    for number, (key, _, _, offsets, sizes) in enumerate(described):
        if prod(sizes):
            yield Box(key, number, tuple(offsets), tuple(sizes))


def _pieces(local: list[list[Any]], needed: list[list[Any]]) -> list[MovedRange]:
    """Return what moves, in the same order on every rank. A rank that has all of a box takes it from itself."""
    sources: dict[str, list[tuple[int, Box]]] = {}
    for rank, parts in enumerate(local):
        for box in _boxes(parts):
            sources.setdefault(box.key, []).append((rank, box))
    pieces = []
    for target, parts in enumerate(needed):
        for wanted in _boxes(parts):
            overlaps = [
                MovedRange(source, target, box, wanted, ends)
                for source, box in sources.get(wanted.key, ())
                if (ends := box.overlap(wanted)) is not None
            ]
            covered = sum(piece.numel for piece in overlaps)
            assert covered == prod(wanted.sizes), f"the ranks hold {covered} elements of {wanted.key}"
            pieces += overlaps
    return sorted(pieces, key=lambda piece: (piece.wanted.key, piece.target, piece.wanted.number))


def _rounds(pieces: list[MovedRange], index: Index) -> Iterator[tuple[torch.dtype, list[MovedRange]]]:
    """Divide the pieces into rounds of one dtype and of limited size."""
    by_dtype: dict[str, list[MovedRange]] = {}
    for piece in pieces:
        by_dtype.setdefault(index.tensors[piece.held.key].dtype, []).append(piece)
    for name, alike in sorted(by_dtype.items()):
        dtype: torch.dtype = getattr(torch, name)
        of_round: list[MovedRange] = []
        size = 0
        for piece in alike:
            if of_round and size + piece.numel * dtype.itemsize > ROUND_BYTES:
                yield dtype, of_round
                of_round, size = [], 0
            of_round.append(piece)
            size += piece.numel * dtype.itemsize
        yield dtype, of_round


def _exchange(
    pieces: list[MovedRange], dtype: torch.dtype, parts: Sequence[LocalPart], wanted: Sequence[LocalPart], mesh: Mesh
) -> None:
    group: Group = mesh.group(WORLD)
    leaving = [piece for target in range(group.size) for piece in pieces
               if piece.source == mesh.rank and piece.target == target]  # fmt: skip
    arriving = [piece for source in range(group.size) for piece in pieces
                if piece.target == mesh.rank and piece.source == source]  # fmt: skip
    out = [parts[piece.held.number].tensor.detach()[piece.held.slices(piece.ends)].reshape(-1) for piece in leaving]
    sent = torch.cat([tensor.to(mesh.device) for tensor in out]) if out else _empty(0, dtype, mesh)
    received = _empty(sum(piece.numel for piece in arriving), dtype, mesh)
    width = dtype.itemsize  # exchanged as bytes: gloo has no all-to-all of some dtypes
    sizes = [
        [width * sum(piece.numel for piece in mine if getattr(piece, side) == rank) for rank in range(group.size)]
        for mine, side in ((arriving, "source"), (leaving, "target"))
    ]
    comm.all_to_all(received.view(torch.uint8), sent.view(torch.uint8), group, PURPOSE, sizes[0], sizes[1])
    start = 0
    for piece in arriving:
        target = wanted[piece.wanted.number].tensor.detach()[piece.wanted.slices(piece.ends)]
        target.copy_(received[start : start + piece.numel].view(target.shape))
        start += piece.numel


def _empty(numel: int, dtype: torch.dtype, mesh: Mesh) -> Tensor:
    return torch.empty(numel, dtype=dtype, device=mesh.device)
