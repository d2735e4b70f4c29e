"""The headers of data files: what a safetensors file says of itself must be what the index says of it. Torch-free."""

from __future__ import annotations

import os
import struct
from math import prod
from pathlib import Path
from typing import Any

from parallelrun.checkpoint.index import DTYPES, INDEX_FILE, Index, broken
from parallelrun.checkpoint.json_checks import as_object, count, list_of, parse
from parallelrun.errors import CheckpointError, Problem

_MAX_HEADER_BYTES = 2**26


def check_header(index: Index, path: Path, name: str) -> None:
    """Raise CheckpointError unless a data file's own header says what the index says of it: keys, dtypes, shapes."""
    file = path / name
    expected = {
        key: (DTYPES[tensor.dtype], part.sizes)
        for key, tensor in index.tensors.items()
        for part in tensor.parts
        if part.file == name
    }
    try:
        header, num_bytes = _read_header(file)
        _check_entries(as_object(header, "the header"), expected, num_bytes)
    except OSError as error:
        raise CheckpointError(Problem(f"cannot read {file}: {error.strerror}")) from error
    except ValueError as error:
        raise broken(file, f"it does not hold what {INDEX_FILE} says ({error})") from error


def _read_header(file: Path) -> tuple[Any, int]:
    """(the header of a safetensors file, the number of bytes after it)."""
    with file.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
            raise ValueError(f"its header is said to have {length} bytes, the file has {size}")
        return parse(stream.read(length)), size - 8 - length


def _check_entries(header: dict[str, Any], expected: dict[str, tuple[Any, tuple[int, ...]]], num_bytes: int) -> None:
    header.pop("__metadata__", None)
    if header.keys() != expected.keys():
        other = sorted(header.keys() ^ expected.keys())
        raise ValueError(f"{len(other)} tensors are in one of the two only, the first is {other[0]!r:.200}")
    spans = []
    for key, entry in header.items():
        (name, itemsize), sizes = expected[key]
        entry = as_object(entry, key)
        found = entry.get("dtype"), entry.get("shape")
        if found != (name, list(sizes)):
            raise ValueError(f"{key} is {found[0]!r:.50} {found[1]!r:.100}, expected {name} {list(sizes)}")
        start, stop = list_of(count, 2)(entry.get("data_offsets"), f"data_offsets of {key}")
        if stop - start != prod(sizes) * itemsize:
            raise ValueError(f"{key} has {stop - start} bytes, expected {prod(sizes) * itemsize}")
        spans.append((start, stop))
    end = 0
    for start, stop in sorted(spans):
        if start != end:
            raise ValueError(f"bytes {end} to {start} belong to no tensor, or to two")
        end = stop
    if end != num_bytes:
        raise ValueError(f"its tensors have {end} bytes, the file holds {num_bytes}")
