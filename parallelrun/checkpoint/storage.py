"""The files of a checkpoint: a safetensors file per rank and one JSON index, without pickle."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from parallelrun.base.errors import CheckpointError, EnvironmentProblem, Problem
from parallelrun.checkpoint.files import Entry, sync, write_bytes, write_safetensors
from parallelrun.checkpoint.index import DTYPES, INDEX_FILE, Box, Index, StoredPart, missing_files
from parallelrun.checkpoint.schema import encode


@dataclass(frozen=True)
class LocalPart:
    """A box of the logical tensor `key` of global `shape`, which starts at `offsets`; `tensor` has the box's sizes."""

    key: str
    tensor: Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...]

    @property
    def box(self) -> Box:
        return Box(self.offsets, tuple(self.tensor.shape))

    @property
    def described(self) -> list[Any]:
        """What other ranks must know of the part, JSON-ready: `index.stored_tensors` reads it."""
        return [self.key, dtype_name(self.tensor.dtype), self.shape, self.offsets, tuple(self.tensor.shape)]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def tensor_bytes(tensor: Any) -> memoryview:
    """The elements of a tensor in C order, as a file holds them."""
    flat = tensor.detach().contiguous().cpu().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())


def file_of_rank(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def create_aside(target: Path) -> Path:
    """Create the hidden directory in which the checkpoint `target` is written. Raises OSError."""
    aside = target.with_name(f".{target.name}.tmp-{secrets.token_hex(4)}")
    aside.mkdir(parents=True)
    return aside


def write_part_file(path: Path, parts: Sequence[LocalPart]) -> tuple[int, str]:
    """Write one rank's parts; return the file's (bytes, sha256). Raises OSError."""
    path.parent.mkdir(exist_ok=True)  # on a shared file system another host may not see it yet
    # Wide elements first: every tensor then starts at a multiple of its element size.
    ordered = sorted(parts, key=lambda part: (-part.tensor.itemsize, part.key))
    entries = [
        Entry(part.key, DTYPES[dtype_name(part.tensor.dtype)][0], part.tensor.shape, part.tensor.nbytes)
        for part in ordered
    ]
    return write_safetensors(path, entries, (tensor_bytes(part.tensor) for part in ordered))


def publish(index: Index, aside: Path, target: Path) -> None:
    """Write the index of the complete files in `aside`, and rename the directory to `target`, which may exist.

    Only the rename makes the checkpoint visible. Raises OSError.
    """
    if wrong := missing_files(index, aside):
        message = f"{wrong[0]}: checkpoints must be on a file system that all hosts share"
        raise EnvironmentProblem(Problem(message, where="runs"))
    write_bytes(aside / INDEX_FILE, encode(index))
    sync(aside)
    replaced = None
    if target.exists():
        replaced = target.with_name(f".{target.name}.old-{secrets.token_hex(4)}")
        os.rename(target, replaced)
    os.rename(aside, target)
    sync(target.parent)
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)


def fill_parts(index: Index, path: Path, parts: Iterable[LocalPart]) -> None:
    """Read the parts from the files of a checkpoint, whichever ranks have written them. Reads no other bytes.

    Raises CheckpointError for a tensor that the checkpoint does not have, SafetensorError and OSError for a bad file.
    """
    pieces: dict[str, list[tuple[LocalPart, StoredPart, Box]]] = {}  # by file
    for part in parts:
        stored = index.tensors.get(part.key)
        dtype = dtype_name(part.tensor.dtype)
        if stored is None or (stored.shape, stored.dtype) != (tuple(part.shape), dtype):
            raise CheckpointError(Problem(f"{part.key} {list(part.shape)} of {dtype} is not in the checkpoint"))
        for source in stored.parts:
            if common := source.overlap(part.box):
                pieces.setdefault(source.file, []).append((part, source, common))
    for name, of_file in pieces.items():
        with safe_open(path / name, framework="pt", device="cpu") as file:
            for part, source, common in of_file:
                target = part.tensor.detach()[part.box.slices(common)]
                target.copy_(read_slice(file, part.key, source.slices(common)).reshape(target.shape))


def read_slice(file: Any, key: str, box: tuple[slice, ...]) -> Tensor:
    """Return a range of a tensor of an open safetensors file."""
    part: Tensor = file.get_slice(key)[box] if box else file.get_tensor(key)
    return part
