"""Writes files that survive a crash: safetensors in one pass with their sha256, and synced directories."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BLOCK = 16 * 2**20


@dataclass(frozen=True)
class Entry:
    """One tensor of a safetensors file: dtype as the format spells it (`F32`), bytes in C order."""

    key: str
    dtype: str
    shape: Sequence[int]
    num_bytes: int


def write_safetensors(
    path: Path, entries: Sequence[Entry], contents: Iterable[memoryview], metadata: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Write a new safetensors file, wait until it is on the disk, and return its (bytes, sha256).

    contents: in the order of `entries`. One tensor is in memory at a time, and is hashed before it reaches the disk.
    metadata: the format's own free texts. Raises OSError (a full disk, an existing file).
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
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
    return 8 + len(text) + offset, digest.hexdigest()


def write_bytes(path: Path, content: bytes) -> None:
    """Write a new file and wait until it is on the disk. Raises OSError."""
    with path.open("xb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a new file and wait until it is on the disk. Raises OSError."""
    write_bytes(path, json.dumps(content, ensure_ascii=False, indent=2, allow_nan=False).encode() + b"\n")


def sync(path: Path) -> None:
    """Wait until a file, or the file names in a directory, are on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def size_of(path: Path) -> int | None:
    """Return the size of a regular file; None if it does not exist, or is a link or a device."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None
