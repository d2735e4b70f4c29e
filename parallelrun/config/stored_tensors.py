"""Compares two stored tensors of a Hugging Face directory, byte by byte."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

SINGLE_FILE, SHARD_INDEX = "model.safetensors", "model.safetensors.index.json"
_BLOCK = 2**20
_MAX_BYTES = 2**28  # of an index or a header


def differ(folder: Path, copy: str, original: Sequence[str]) -> bool:
    """Return whether a directory holds both tensors, with different types, shapes or bytes. original: its spellings.

    False for files that cannot be read: whoever reads the weights names what is wrong with them.
    """
    try:
        files = _files_of_keys(folder)
        name = next((name for name in original if name in files), None)
        if copy not in files or name is None:
            return False
        with files[copy].open("rb") as left, files[name].open("rb") as right:
            kind, size = _seek(left, copy)
            if (kind, size) != _seek(right, name):
                return True
            blocks = (min(_BLOCK, size - start) for start in range(0, size, _BLOCK))
            return any(left.read(block) != right.read(block) for block in blocks)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error):
        return False


def _files_of_keys(folder: Path) -> dict[str, Path]:
    index = folder / SHARD_INDEX
    if index.is_file():
        with index.open("rb") as stream:
            return {key: folder / name for key, name in json.loads(stream.read(_MAX_BYTES))["weight_map"].items()}
    with (folder / SINGLE_FILE).open("rb") as stream:
        return dict.fromkeys(_header(stream), folder / SINGLE_FILE)


def _header(stream: BinaryIO) -> Any:
    (size,) = struct.unpack("<Q", stream.read(8))
    return json.loads(stream.read(min(size, _MAX_BYTES)))


def _seek(stream: BinaryIO, key: str) -> tuple[Any, int]:
    """Move to the first byte of a tensor; return its type and shape, and its number of bytes."""
    entry = _header(stream)[key]
    start, stop = entry["data_offsets"]
    stream.seek(start, 1)
    return (entry["dtype"], entry["shape"]), stop - start
