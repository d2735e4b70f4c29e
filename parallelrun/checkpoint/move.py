"""Moves weights and optimizer state between the ranks of two plans of one world, without a disk.

Every rank tells which boxes of logical tensors it has under the old plan and needs under the new one. From that, all
ranks compute the same list of pieces, and exchange them by all-to-all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from parallelrun.checkpoint.index import Box, Index, describe_plan, stored_tensors
from parallelrun.checkpoint.storage import LocalPart
from parallelrun.checkpoint.store import TrainingState, parts_wanted
from parallelrun.distributed import comm
from parallelrun.distributed.mesh import Group, Mesh
from parallelrun.planner.contract.plan import WORLD

PURPOSE = "reshape"
ROUND_BYTES = 2**28  # that all ranks together exchange at once: it bounds the buffers


@dataclass(frozen=True)
class MovedBox:
    """A box of the tensor `key`, from part number `sent` of rank `source` to part number `filled` of rank `target`."""

    key: str
    target: int
    filled: int
    source: int
    sent: int
    box: Box


def move(parts: Sequence[LocalPart], kinds: Sequence[str], state: TrainingState) -> int:
    """Fill the state of the new plan; return the bytes that all ranks have exchanged.

    parts: what this rank holds under the old plan (`store.parts_of`); the ranks' parts together have every element
    once. kinds: of the old strategy's additional tensors (`kept`). Collective over the world, which both plans share.
    The caller must then call `DataRuntime.finish_update`.
    """
    mesh, plan = state.mesh, state.plan
    local = comm.gather_json([part.described for part in parts], mesh)
    tensors = stored_tensors(local, [str(rank) for rank in range(len(local))])  # the ranks are its files
    index = Index(0, plan.optimizer, describe_plan(plan), {"kept": list(kinds)}, tensors, {})
    wanted, states = parts_wanted(index, state)
    needed = comm.gather_json([part.described for part in wanted], mesh)
    num_bytes = 0
    for dtype, pieces in _rounds(_pieces(local, needed), index):
        _exchange(pieces, dtype, parts, wanted, mesh)
        num_bytes += sum(piece.box.numel for piece in pieces if piece.source != piece.target) * dtype.itemsize
    for parameter, values in states:
        state.optimizer.load_state(parameter.name, values)
    return num_bytes


def _boxes(described: list[Any]) -> Iterator[tuple[str, int, Box]]:
    """Yield key, number and box of every part of a rank that has elements."""
    for number, (key, _, _, offsets, sizes) in enumerate(described):
        if prod(sizes):
            yield key, number, Box(tuple(offsets), tuple(sizes))


def _pieces(local: list[list[Any]], needed: list[list[Any]]) -> list[MovedBox]:
    """Return what moves, in the same order on every rank. A rank that has all of a box takes it from itself."""
    sources: dict[str, list[tuple[int, int, Box]]] = {}
    for rank, parts in enumerate(local):
        for key, number, box in _boxes(parts):
            sources.setdefault(key, []).append((rank, number, box))
    pieces = []
    for target, parts in enumerate(needed):
        for key, number, wanted in _boxes(parts):
            overlaps = [
                MovedBox(key, target, number, rank, sent, common)
                for rank, sent, box in sources.get(key, ())
                if (common := box.overlap(wanted)) is not None
            ]
            covered = sum(piece.box.numel for piece in overlaps)
            assert covered == wanted.numel, f"the ranks hold {covered} elements of {key}"
            pieces += overlaps
    return sorted(pieces, key=lambda piece: (piece.key, piece.target, piece.filled))


def _rounds(pieces: list[MovedBox], index: Index) -> Iterator[tuple[torch.dtype, list[MovedBox]]]:
    """Divide the pieces into rounds of one dtype and of limited size."""
    by_dtype: dict[str, list[MovedBox]] = {}
    for piece in pieces:
        by_dtype.setdefault(index.tensors[piece.key].dtype, []).append(piece)
    for name, of_dtype in sorted(by_dtype.items()):
        dtype: torch.dtype = getattr(torch, name)
        of_round: list[MovedBox] = []
        size = 0
        for piece in of_dtype:
            if of_round and size + piece.box.numel * dtype.itemsize > ROUND_BYTES:
                yield dtype, of_round
                of_round, size = [], 0
            of_round.append(piece)
            size += piece.box.numel * dtype.itemsize
        yield dtype, of_round


def _exchange(
    pieces: list[MovedBox], dtype: torch.dtype, parts: Sequence[LocalPart], wanted: Sequence[LocalPart], mesh: Mesh
) -> None:
    group: Group = mesh.group(WORLD)
    leaving = sorted((piece for piece in pieces if piece.source == mesh.rank), key=lambda piece: piece.target)
    arriving = sorted((piece for piece in pieces if piece.target == mesh.rank), key=lambda piece: piece.source)
    out = [_view(parts[piece.sent], piece.box).reshape(-1).to(mesh.device) for piece in leaving]
    sent = torch.cat(out) if out else torch.empty(0, dtype=dtype, device=mesh.device)
    counts = [piece.box.numel for piece in arriving]
    received = torch.empty(sum(counts), dtype=dtype, device=mesh.device)
    width = dtype.itemsize  # exchanged as bytes: gloo has no all-to-all of some dtypes
    sizes = [
        [width * sum(piece.box.numel for piece in mine if getattr(piece, side) == rank) for rank in range(group.size)]
        for mine, side in ((arriving, "source"), (leaving, "target"))
    ]
    comm.all_to_all(received.view(torch.uint8), sent.view(torch.uint8), group, PURPOSE, sizes[0], sizes[1])
    for piece, values in zip(arriving, received.split(counts)):
        target = _view(wanted[piece.filled], piece.box)
        target.copy_(values.view(target.shape))


def _view(part: LocalPart, box: Box) -> Tensor:
    """Return the elements of a part that are in a box."""
    return part.tensor.detach()[part.box.slices(box)]
