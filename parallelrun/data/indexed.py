"""Megatron's indexed token files, PREFIX.bin and PREFIX.idx, read and written byte for byte.

Format: the shared PTD-P notes, 3.1. PREFIX.bin holds all token ids back to back. PREFIX.idx, little endian: magic
(9 bytes), uint64 version, uint8 element type, uint64 sequences N, uint64 document boundaries M, int32[N] lengths in
tokens, int64[N] byte offsets, int64[M] sequence numbers at which documents start (first 0, last N).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parallelrun.errors import EnvironmentProblem, Problem

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
ELEMENT_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
SMALL_VOCAB = 65500


def element_type(vocab: int) -> np.dtype[Any]:
    """uint16 where the convention allows it, else int32."""
    return np.dtype("<u2" if vocab < SMALL_VOCAB else "<i4")


@dataclass(frozen=True)
class IndexedTokens:
    """An opened pair of files. tokens: (all,) memory map; lengths, offsets (N,) in tokens; documents (M,)."""

    prefix: Path
    tokens: NDArray[Any]
    lengths: NDArray[np.int64]
    offsets: NDArray[np.int64]
    documents: NDArray[np.int64]

    @property
    def num_documents(self) -> int:
        return max(0, self.documents.size - 1)

    def document_ranges(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(start, length) in tokens of every document; its sequences lie back to back."""
        ends = self.offsets + self.lengths
        bounds = np.append(self.offsets, ends[-1] if ends.size else 0)
        starts = bounds[self.documents[:-1]]
        return starts, bounds[self.documents[1:]] - starts


def data_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".bin")


def index_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".idx")


def open_indexed(prefix: Path) -> IndexedTokens:
    """Map PREFIX.bin by PREFIX.idx. Raises EnvironmentProblem for anything that is not exactly the format."""
    bin_path, idx_path = data_path(prefix), index_path(prefix)
    try:
        raw = idx_path.read_bytes()
        bin_bytes = bin_path.stat().st_size
    except OSError as error:
        raise _problem(f"cannot read {error.filename}: {error.strerror}") from error
    if len(raw) < HEADER.size or not raw.startswith(MAGIC):
        raise _problem(f"{idx_path} is no Megatron index: it does not begin with {MAGIC!r}")
    _, version, code, num_sequences, num_boundaries = HEADER.unpack_from(raw)
    if version != VERSION:
        raise _problem(f"{idx_path} has version {version}; only version {VERSION} is known")
    kind = np.dtype(ELEMENT_TYPES.get(code, "<f8"))
    if kind.kind == "f":
        raise _problem(f"{idx_path} has element type {code}, which is no integer type for token ids")
    wanted = HEADER.size + 12 * num_sequences + 8 * num_boundaries
    if len(raw) not in (wanted, wanted + num_sequences):  # the modes of multimodal files, a byte each, are not read
        raise _problem(
            f"{idx_path} has {len(raw)} bytes; {num_sequences} sequences and {num_boundaries} document boundaries "
            f"need {wanted}: it is truncated or damaged"
        )
    lengths = np.frombuffer(raw, "<i4", num_sequences, HEADER.size).astype(np.int64)
    byte_offsets = np.frombuffer(raw, "<i8", num_sequences, HEADER.size + 4 * num_sequences)
    documents = np.frombuffer(raw, "<i8", num_boundaries, HEADER.size + 12 * num_sequences).astype(np.int64)
    _check(idx_path, bin_path, bin_bytes, kind.itemsize, lengths, byte_offsets, documents)
    count = bin_bytes // kind.itemsize
    tokens = np.memmap(bin_path, dtype=kind, mode="r", shape=(count,)) if count else np.empty(0, kind)
    return IndexedTokens(prefix, tokens, lengths, byte_offsets // kind.itemsize, documents)


def _check(
    idx_path: Path,
    bin_path: Path,
    bin_bytes: int,
    item_bytes: int,
    lengths: NDArray[np.int64],
    byte_offsets: NDArray[np.int64],
    documents: NDArray[np.int64],
) -> None:
    if (lengths < 0).any() or not np.array_equal(byte_offsets, (np.cumsum(lengths) - lengths) * item_bytes):
        raise _problem(f"{idx_path} is damaged: its offsets are not the running sum of its sequence lengths")
    needed = int(lengths.sum()) * item_bytes
    if bin_bytes < needed:
        raise _problem(f"{bin_path} is truncated: {bin_bytes} bytes, its index describes {needed}")
    if not documents.size or documents[0] != 0 or documents[-1] != lengths.size or (np.diff(documents) < 0).any():
        raise _problem(f"{idx_path} is damaged: document boundaries must rise from 0 to {lengths.size} sequences")


def write_indexed(prefix: Path, documents: Iterable[Iterable[NDArray[Any]]], kind: np.dtype[Any]) -> tuple[int, int]:
    """Write documents, each a run of sequences of token ids; returns (documents, tokens) written.

    Both files are written aside and renamed, the index last: an interrupted run leaves no pair that looks whole.
    Raises ValueError for a token id that `kind` cannot hold, OSError.
    """
    code = next(code for code, text in ELEMENT_TYPES.items() if np.dtype(text) == kind)
    bounds = np.iinfo(kind)
    lengths: list[int] = []
    boundaries = [0]
    bin_aside, idx_aside = (path.with_name(path.name + ".part") for path in (data_path(prefix), index_path(prefix)))
    try:
        with bin_aside.open("wb") as stream:
            for document in documents:
                for sequence in document:
                    if sequence.size and (sequence.min() < bounds.min or sequence.max() > bounds.max):
                        raise ValueError(f"token id {sequence.max()} does not fit {kind.name}")
                    stream.write(sequence.astype(kind).tobytes())
                    lengths.append(sequence.size)
                boundaries.append(len(lengths))
        sizes = np.array(lengths, dtype="<i4")
        offsets = (np.cumsum(sizes, dtype="<i8") - sizes) * kind.itemsize
        with idx_aside.open("wb") as stream:
            stream.write(HEADER.pack(MAGIC, VERSION, code, len(lengths), len(boundaries)))
            for array in (sizes, offsets.astype("<i8"), np.array(boundaries, dtype="<i8")):
                stream.write(array.tobytes())
        os.replace(bin_aside, data_path(prefix))
        os.replace(idx_aside, index_path(prefix))
    finally:
        for path in (bin_aside, idx_aside):
            path.unlink(missing_ok=True)
    return len(boundaries) - 1, int(sizes.sum())


def _problem(what: str) -> EnvironmentProblem:
    return EnvironmentProblem(Problem(what, where="dataset.path", command="parallelrun tokenize FILE --output PREFIX"))
