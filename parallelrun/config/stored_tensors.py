"""The safetensors files of a directory: their checked headers, and whether two stored tensors differ in any byte."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from parallelrun.base import forms
from parallelrun.base.errors import CheckpointError, Problem

SINGLE_FILE, SHARD_INDEX = "model.safetensors", "model.safetensors.index.json"
_BLOCK = 2**20
_MAX_INDEX_BYTES = 2**28
_MAX_HEADER_BYTES = 2**26


def differ(folder: Path, copy: str, original: Sequence[str]) -> bool:
    """Return whether a directory holds both tensors, with different types, shapes or bytes. original: its spellings.

    False for files that cannot be read: whoever reads the weights names what is wrong with them.
    """
    try:
        files = files_of_keys(folder)
        name = next((name for name in original if name in files), None)
        if copy not in files or name is None:
            return False
        with files[copy].open("rb") as left, files[name].open("rb") as right:
            kind, size = _seek(left, copy)
            if (kind, size) != _seek(right, name):
                return True
            blocks = (min(_BLOCK, size - start) for start in range(0, size, _BLOCK))
            return any(left.read(block) != right.read(block) for block in blocks)
    except (CheckpointError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _seek(stream: BinaryIO, key: str) -> tuple[Any, int]:
    """Move to the first byte of a tensor; return its type and shape, and its number of bytes."""
    entry = read_header(stream)[0][key]
    start, stop = entry["data_offsets"]
    stream.seek(start, os.SEEK_CUR)
    return (entry["dtype"], entry["shape"]), stop - start


def files_of_keys(path: Path) -> dict[str, Path]:
    """The safetensors file of every key of a directory: one file, or shards with an index. Raises CheckpointError."""
    index = path / SHARD_INDEX
    if not index.is_file():
        file = path / SINGLE_FILE
        return dict.fromkeys(read_entries(file), file)
    try:
        if index.stat().st_size > _MAX_INDEX_BYTES:
            raise ValueError(f"it has more than {_MAX_INDEX_BYTES} bytes")
        weight_map = json.loads(index.read_bytes())["weight_map"]
        names = dict(weight_map)
        if wrong := [name for name in names.values() if not isinstance(name, str) or name != os.path.basename(name)]:
            raise ValueError(f"{wrong[0]!r:.100} is no file of the same directory")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise damaged(index, f"it is no index of safetensors files ({error})") from error
    return {key: path / name for key, name in names.items()}


def read_entries(file: Path) -> dict[str, Any]:
    """The checked header of a safetensors file, without its metadata. Raises CheckpointError."""
    try:
        with file.open("rb") as stream:
            header, num_bytes = read_header(stream)
        entries = {key: entry for key, entry in header.items() if key != "__metadata__"}
        for key, entry in entries.items():
            shape, (start, stop) = entry["shape"], entry["data_offsets"]
            if any(type(size) is not int or size < 0 for size in shape) or not 0 <= start <= stop <= num_bytes:
                raise ValueError(f"{key} has the shape {shape} at bytes {start} to {stop} of {num_bytes}")
        return entries
    except FileNotFoundError as error:
        raise CheckpointError(Problem(f"there is no {file}")) from error
    except OSError as error:
        raise CheckpointError(Problem(f"cannot read {file}: {error.strerror}")) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(file, f"it is no safetensors file ({error})") from error


def read_header(stream: BinaryIO) -> tuple[Any, int]:
    """Return a safetensors file's unchecked header and the number of bytes after it. Raises OSError, ValueError."""
    size = os.fstat(stream.fileno()).st_size
    start = stream.read(8)
    length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
    if not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
        raise ValueError(f"the length of its header is given as {length} bytes, the file has {size}")
    return forms.parse(stream.read(length)), size - 8 - length


def damaged(path: Path, cause: str) -> CheckpointError:
    """The error for a file that is not what its name says."""
    return CheckpointError(Problem(f"{path} is damaged: {cause}"))
