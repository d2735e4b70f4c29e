"""Strict checks of JSON from other programs and of safetensors headers. Torch-free.

Each check of a value raises ValueError with the place of the mistake.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterable
from math import prod
from pathlib import Path
from typing import Any, TypeVar

from parallelrun.checkpoint.index import DTYPES, INDEX_FILE, Index, broken
from parallelrun.errors import CheckpointError, Problem

T = TypeVar("T")
Check = Callable[[Any, str], T]
_MAX_NAME = 1000
_MAX_NUMBER = 2**53  # exact in every JSON reader
_MAX_HEADER_BYTES = 2**26


def parse(raw: bytes) -> Any:
    """Parse strict JSON: without NaN, repeated keys, or nesting that exhausts the stack. Raises ValueError."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            raise ValueError("an object has the same key twice")
        return fields

    def refuse(word: str) -> Any:
        raise ValueError(f"{word} is not a number")

    try:
        return json.loads(raw, object_pairs_hook=unique, parse_constant=refuse)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def as_object(value: Any, where: str) -> dict[str, Any]:
    """Check a JSON object."""
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {value!r:.100}, not an object")
    return value


def same_keys(fields: dict[str, Any], wanted: Iterable[str], where: str) -> None:
    """Check that an object has exactly the wanted keys."""
    if fields.keys() != set(wanted):
        missing, unknown = sorted(set(wanted) - fields.keys()), sorted(fields.keys() - set(wanted))
        what = f"has no {missing[0]}" if missing else f"has an unknown field {unknown[0]!r:.200}"
        raise ValueError(f"{where} {what}")


def integer(value: Any, where: str) -> int:
    """Check an integer; booleans are none."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{where} is {value!r:.100}, not an integer")
    return value


def count(value: Any, where: str) -> int:
    """Check an integer >= 0."""
    number = integer(value, where)
    if not 0 <= number <= _MAX_NUMBER:
        raise ValueError(f"{where} is {value!r:.100}, not between 0 and {_MAX_NUMBER}")
    return number


def positive(value: Any, where: str) -> int:
    """Check an integer >= 1."""
    if not (number := count(value, where)):
        raise ValueError(f"{where} is 0")
    return number


def printable_name(value: Any, where: str) -> str:
    """Check a non-empty text of printable characters, so that it cannot control a terminal."""
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_NAME or not value.isprintable():
        raise ValueError(f"{where} is {value!r:.100}, not a printable name")
    return value


def word(value: Any, where: str) -> str | int | None:
    """Check a name, a count, or null."""
    return value if value is None else printable_name(value, where) if isinstance(value, str) else count(value, where)


def optional(check: Check[T]) -> Check[T | None]:
    """Return a check that also accepts null."""
    return lambda value, where: None if value is None else check(value, where)


def list_of(check: Check[T], length: int | None = None, at_most: int | None = None) -> Check[list[T]]:
    """Return a check of a list that applies `check` to each entry."""

    def checked(value: Any, where: str) -> list[T]:
        if not isinstance(value, list):
            raise ValueError(f"{where} is {value!r:.100}, not a list")
        if (length is not None and len(value) != length) or (at_most is not None and len(value) > at_most):
            raise ValueError(f"{where} has {len(value)} entries")
        return [check(item, where) for item in value]

    return checked


def check_header(index: Index, path: Path, name: str) -> None:
    """Raise CheckpointError unless a data file's header has the keys, dtypes and shapes of the index."""
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
        raise broken(file, f"its header differs from {INDEX_FILE} ({error})") from error


def _read_header(file: Path) -> tuple[Any, int]:
    """Return the header of a safetensors file and the number of bytes after it."""
    with file.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
            raise ValueError(f"the length of its header is given as {length} bytes, the file has {size}")
        return parse(stream.read(length)), size - 8 - length


def _check_entries(header: dict[str, Any], expected: dict[str, tuple[Any, tuple[int, ...]]], num_bytes: int) -> None:
    header.pop("__metadata__", None)
    if header.keys() != expected.keys():
        other = sorted(header.keys() ^ expected.keys())
        raise ValueError(f"{len(other)} tensors are in only one of the two, the first is {other[0]!r:.200}")
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
            raise ValueError(f"bytes {end} to {start} belong to no tensor or to two")
        end = stop
    if end != num_bytes:
        raise ValueError(f"its tensors have {end} bytes, the file holds {num_bytes}")
