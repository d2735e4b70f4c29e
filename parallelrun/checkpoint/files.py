"""Files that survive a crash: safetensors written in one pass with their sha256, and renames that reach the disk."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

BLOCK = 16 * 2**20


@dataclass(frozen=True)
class Written:
    """A data file as it was meant to be, hashed before it reached the disk."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Entry:
    """One tensor of a safetensors file: dtype in the format's own words (`F32`), bytes in C order."""

    key: str
    dtype: str
    shape: Sequence[int]
    num_bytes: int


def write_safetensors(path: Path, entries: Sequence[Entry], contents: Iterable[memoryview]) -> Written:
    """Write a new safetensors file and wait until it is on the disk. `contents` comes in the order of `entries`.

    One tensor is held at a time. Raises OSError (a full disk, an existing file).
    """
    header, offset = {}, 0
    for entry in entries:
        end = offset + entry.num_bytes
        header[entry.key] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with path.open("xb") as stream:

        def put(block: bytes | memoryview) -> None:
            digest.update(block)
            stream.write(block)

        put(struct.pack("<Q", len(text)) + text)
        for entry, content in zip(entries, contents, strict=True):
            assert content.nbytes == entry.num_bytes, f"{entry.key} has {content.nbytes} bytes, not {entry.num_bytes}"
            for start in range(0, content.nbytes, BLOCK):
                put(content[start : start + BLOCK])
        stream.flush()
        os.fsync(stream.fileno())
    return Written(8 + len(text) + offset, digest.hexdigest())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a new file and wait until it is on the disk. Raises OSError."""
    with path.open("xb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def sync_directory(path: Path) -> None:
    """Wait until the names in a directory are on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def size_of(path: Path) -> int | None:
    """Size of a regular file; None when there is none (a link or a device is none)."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def sha256_of(path: Path) -> str:
    """sha256 of a file's bytes, in hexadecimal. Raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def remove_tree(path: Path) -> None:
    """Delete a directory that is no longer needed; what cannot be deleted stays, and harms nobody."""
    shutil.rmtree(path, ignore_errors=True)
