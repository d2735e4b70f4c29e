"""Byte-level tokens of files: what `pystdlib` and `text` share."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parallelrun.config.schema import Config
from parallelrun.data.arrays import np
from parallelrun.data.dataset import Dataset, Documents, split_documents
from parallelrun.model_spec import ModelSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray

VOCAB = 256
# A file up to this size is hashed whole; of a larger one its size, first and last mebibyte, so that opening stays fast.
WHOLE_HASH_BYTES = 64 * 2**20


@dataclass(frozen=True)
class File:
    """A file's bytes (uint8, in memory or mapped) under a name that does not depend on where the folder lies."""

    name: str
    path: str
    content: NDArray[np.uint8]


def hash_name(name: str) -> int:
    """A stable 64-bit hash of a file's name."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def digest_array(content: NDArray[Any]) -> bytes:
    """sha256 of an array's size and bytes (of its ends only, when it is larger than `WHOLE_HASH_BYTES`)."""
    flat: Any = memoryview(np.asarray(content).view(np.uint8).data)
    digest = hashlib.sha256(f"{flat.nbytes}:".encode())
    if flat.nbytes <= WHOLE_HASH_BYTES:
        digest.update(flat)
    else:
        digest.update(flat[: 2**20])
        digest.update(flat[-(2**20) :])
    return digest.digest()


def fingerprint(files: Sequence[File]) -> str:
    """sha256 over the names and contents of all files, in order."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + digest_array(file.content))
    return digest.hexdigest()


def open_files(
    name: str, files: Sequence[File], fingerprint: str, config: Config, spec: ModelSpec, source: str
) -> Dataset:
    """Windows over the files' bytes; train and val by hash of the file, or of fixed-size pieces when files are few."""
    names = [file.name for file in files] if len(files) > 1 else [""]  # renaming a lone file keeps its splits
    documents = Documents(
        sources=[file.content for file in files],
        names=tuple(file.path for file in files),
        source_of=np.arange(len(files)),
        starts=np.zeros(len(files), dtype=np.int64),
        lengths=np.array([file.content.size for file in files], dtype=np.int64),
        keys=np.array([hash_name(name) for name in names], dtype=np.uint64),
    )
    return split_documents(name, documents, VOCAB, fingerprint, config, spec, source)


def read_file(path: Path, name: str, max_bytes: int | None = None) -> File:
    """The first `max_bytes` of a file: read when small, memory-mapped when not. Raises OSError."""
    size = path.stat().st_size
    if max_bytes is not None:
        size = min(size, max_bytes)
    if size > 2**20:
        return File(name, str(path), np.memmap(path, dtype=np.uint8, mode="r", shape=(size,)))
    with path.open("rb") as stream:
        return File(name, str(path), np.frombuffer(stream.read(size), dtype=np.uint8))
