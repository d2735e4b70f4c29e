"""Reading `index.json` and the headers of data files: every field is checked once, here, before anything uses it.

A checkpoint may come from a stranger, who can seal any content with a good sha256. What passes here has the types,
ranges and printable names that the rest of the package relies on. Torch-free.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import struct
from collections import Counter
from collections.abc import Callable
from itertools import product
from math import isfinite, prod
from pathlib import Path
from typing import Any

from parallelrun.checkpoint.index import (
    DATA_FILE,
    DTYPES,
    FORMAT,
    HASH_SPAN,
    INDEX_FILE,
    NO_HASH,
    PREFIX,
    SCHEMA,
    Index,
    Part,
    StoredTensor,
    broken,
)
from parallelrun.errors import CheckpointError, Problem

MAX_INDEX_BYTES = 2**28
_MAX_HEADER_BYTES = 2**26
_MAX_DIMS = 8
_MAX_NAME = 1000
_LARGEST = 2**53  # of any number: exact in every JSON reader
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NEEDED = ("step", "global_batch", "scaler")  # of `extra`, to go on with a training
_FIELDS = ("sha256", "schema", "format", "step", "optimizer", "plan", "extra", "tensors", "files")
_Check = Callable[[Any, str], Any]


def read_index(path: Path) -> Index:
    """The checked index of a checkpoint directory. Raises CheckpointError when it is missing or damaged."""
    file = path / INDEX_FILE
    try:
        # O_NONBLOCK: opening a pipe must not wait for its writer.
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        with os.fdopen(descriptor, "rb") as stream:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise broken(file, "it is no regular file")
            if status.st_size > MAX_INDEX_BYTES:
                raise broken(file, f"it has {status.st_size} bytes, at most {MAX_INDEX_BYTES} are read")
            return decode(stream.read(MAX_INDEX_BYTES), file)
    except FileNotFoundError as error:
        raise CheckpointError(Problem(f"{path} is half-written or no checkpoint: it has no {INDEX_FILE}")) from error
    except OSError as error:
        raise CheckpointError(Problem(f"cannot read {file}: {error.strerror}")) from error


def decode(raw: bytes, path: Path) -> Index:
    """The index in a file's content. Raises CheckpointError when a single bit of it is not as it was written."""
    if not raw.startswith(PREFIX):
        raise broken(path, "it is no index of a parallelrun checkpoint")
    expected = raw[HASH_SPAN]
    found = hashlib.sha256(raw[: HASH_SPAN.start] + NO_HASH + raw[HASH_SPAN.stop :]).hexdigest()
    if expected != found.encode():
        raise broken(path, f"its sha256 is {found}, expected {expected.decode(errors='replace')}")
    try:
        return _index(_json(raw), found)
    except ValueError as error:  # written by something else, yet with a good hash
        raise broken(path, f"its content is not understood ({error})") from error


def check_training(index: Index, path: Path) -> None:
    """Raise CheckpointError unless the checkpoint says what a training needs to go on from it."""
    missing = [f"extra.{key}" for key in _NEEDED if key not in index.extra]
    if missing:
        raise broken(path / INDEX_FILE, f"it has no {', '.join(missing)}, so no training can go on from it")


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
        _check_entries(_object(header, "the header"), expected, num_bytes)
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
        return _json(stream.read(length)), size - 8 - length


def _check_entries(header: dict[str, Any], expected: dict[str, tuple[Any, tuple[int, ...]]], num_bytes: int) -> None:
    header.pop("__metadata__", None)
    if header.keys() != expected.keys():
        other = sorted(header.keys() ^ expected.keys())
        raise ValueError(f"{len(other)} tensors are in one of the two only, the first is {other[0]!r:.200}")
    spans = []
    for key, entry in header.items():
        (name, itemsize), sizes = expected[key]
        entry = _object(entry, key)
        found = entry.get("dtype"), entry.get("shape")
        if found != (name, list(sizes)):
            raise ValueError(f"{key} is {found[0]!r:.50} {found[1]!r:.100}, expected {name} {list(sizes)}")
        start, stop = _list(_count, 2)(entry.get("data_offsets"), f"data_offsets of {key}")
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


def _json(raw: bytes) -> Any:
    """Strict JSON: no NaN, no key twice, no nesting that exhausts the stack. Raises ValueError."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            raise ValueError("a key stands twice in one object")
        return fields

    def refuse(word: str) -> Any:
        raise ValueError(f"{word} is no number")

    try:
        return json.loads(raw, object_pairs_hook=unique, parse_constant=refuse)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _index(body: Any, digest: str) -> Index:
    fields = _object(body, "the index")
    _same_keys(fields, _FIELDS, "the index")
    if fields["schema"] != SCHEMA or fields["format"] != FORMAT:
        raise ValueError(f"schema {fields['schema']!r:.50} of {fields['format']!r:.50}, known is {SCHEMA}")
    step = _count(fields["step"], "step")
    extra = _extra(fields["extra"], step)
    files = {name: _file(value, name) for name, value in _object(fields["files"], "files").items()}
    tensors = {key: _tensor(value, key, files) for key, value in _object(fields["tensors"], "tensors").items()}
    used = {part.file for tensor in tensors.values() for part in tensor.parts}
    if unused := files.keys() - used:
        raise ValueError(f"no tensor is stored in {sorted(unused)[0]}")
    return Index(step, _name(fields["optimizer"], "optimizer"), _plan(fields["plan"]), extra, tensors, files, digest)


def _plan(value: Any) -> dict[str, Any]:
    """The description of the plan (`index.describe_plan`), which is for people: any field may be absent."""
    checks: dict[str, _Check] = {
        "world": _positive,
        "degrees": lambda v, at: {_name(k, at): _positive(d, f"{at}.{k}") for k, d in _object(v, at).items()},
        "data": _name,
        "shard": _optional(_positive),
        "tensor": _name,
        "pipeline": _name,
        "chunks": _optional(_positive),
        "precision": _name,
    }
    plan = _object(value, "plan")
    return {_name(key, "a field of plan"): checks.get(key, _word)(item, f"plan.{key}") for key, item in plan.items()}


def _extra(value: Any, step: int) -> dict[str, Any]:
    """What the saver keeps beside the tensors: the fields that a training reads are checked, others are its own."""
    checks: dict[str, _Check] = {
        "step": _count,
        "samples": _count,
        "global_batch": _positive,
        "seed": _integer,
        "dataset": _dataset,
        "scaler": _scaler,
        "kept": _list(_name),
        "clocks": _list(_count),
    }
    extra = _object(value, "extra")
    for key, check in checks.items():
        if key in extra:
            check(extra[key], f"extra.{key}")
    if extra.get("step", step) != step:
        raise ValueError(f"extra.step is {extra['step']}, step is {step}")
    return extra


def _dataset(value: Any, where: str) -> None:
    fields = _object(value, where)
    _same_keys(fields, ("name", "fingerprint"), where)
    _name(fields["name"], f"{where}.name")
    _optional(_name)(fields["fingerprint"], f"{where}.fingerprint")


def _scaler(value: Any, where: str) -> None:
    fields = _object(value, where)
    _same_keys(fields, ("scale", "applied_in_a_row"), where)
    scale = fields["scale"]
    if type(scale) not in (int, float) or not isfinite(scale) or scale <= 0:
        raise ValueError(f"{where}.scale is {scale!r:.50}, not a positive number")
    _count(fields["applied_in_a_row"], f"{where}.applied_in_a_row")


def _file(value: Any, name: str) -> tuple[int, str]:
    if not DATA_FILE.fullmatch(name):
        raise ValueError(f"a data file is called {name!r:.200}")
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError(f"{name} has not a size and a sha256")
    sha256 = value[1]
    if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
        raise ValueError(f"the sha256 of {name} is {sha256!r:.100}")
    return _count(value[0], f"the size of {name}"), sha256


def _tensor(value: Any, key: str, files: dict[str, tuple[int, str]]) -> StoredTensor:
    _name(key, "a tensor's name")
    if key.startswith("optimizer/") and key.count("/") < 2:
        raise ValueError(f"{key} is not optimizer/<kind>/<parameter>")
    fields = _object(value, key)
    _same_keys(fields, ("dtype", "shape", "parts"), key)
    if not isinstance(fields["dtype"], str) or fields["dtype"] not in DTYPES:
        raise ValueError(f"{key} has dtype {fields['dtype']!r:.50}")
    shape = tuple(_list(_count, at_most=_MAX_DIMS)(fields["shape"], f"shape of {key}"))
    parts = tuple(_list(_part)(fields["parts"], key))
    stored_in = [part.file for part in parts]
    if strange := [name for name in stored_in if name not in files]:
        raise ValueError(f"{key} is stored in {strange[0]!r:.200}, which is no data file")
    _check_cover(key, shape, parts)
    if len(set(stored_in)) < len(stored_in):
        raise ValueError(f"two parts of {key} are in one file")
    return StoredTensor(fields["dtype"], shape, parts)


def _part(value: Any, where: str) -> Part:
    fields = _object(value, f"a part of {where}")
    _same_keys(fields, ("offsets", "sizes", "file"), f"a part of {where}")
    if not isinstance(fields["file"], str):
        raise ValueError(f"a data file of {where} is called {fields['file']!r:.200}")
    numbers = _list(_count, at_most=_MAX_DIMS)
    offsets, sizes = (tuple(numbers(fields[key], f"{key} of {where}")) for key in ("offsets", "sizes"))
    return Part(offsets, sizes, fields["file"])


def _check_cover(key: str, shape: tuple[int, ...], parts: tuple[Part, ...]) -> None:
    """Raise ValueError unless the parts make up the shape, every element once.

    The sum of the parts' indicator functions is that of the shape exactly if their signed corners are the same: a box
    has, per dim, +1 at its start and -1 at its stop.
    """
    corners: Counter[tuple[int, ...]] = Counter()
    boxes = [(-1, (0,) * len(shape), shape), *((1, part.offsets, part.sizes) for part in parts)]
    fits = all(len(part.offsets) == len(part.sizes) == len(shape) for part in parts)
    for sign, offsets, sizes in boxes if fits else ():
        for ends in product((0, 1), repeat=len(shape)):
            corner = tuple(o + n * end for o, n, end in zip(offsets, sizes, ends))
            corners[corner] += sign * (-1) ** sum(ends)
    if not fits or any(corners.values()):
        raise ValueError(f"the parts of {key} do not make up its shape {list(shape)}")


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {value!r:.100}, not an object")
    return value


def _same_keys(fields: dict[str, Any], wanted: Any, where: str) -> None:
    if fields.keys() != set(wanted):
        missing, unknown = sorted(set(wanted) - fields.keys()), sorted(fields.keys() - set(wanted))
        what = f"has no {missing[0]}" if missing else f"has an unknown field {unknown[0]!r:.200}"
        raise ValueError(f"{where} {what}")


def _integer(value: Any, where: str) -> int:
    if type(value) is not int:
        raise ValueError(f"{where} is {value!r:.100}, not an integer")
    return value


def _count(value: Any, where: str) -> int:
    if not 0 <= _integer(value, where) <= _LARGEST:
        raise ValueError(f"{where} is {value!r:.100}, not between 0 and {_LARGEST}")
    return value


def _positive(value: Any, where: str) -> int:
    if _count(value, where) == 0:
        raise ValueError(f"{where} is 0")
    return value


def _name(value: Any, where: str) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_NAME or not value.isprintable():
        raise ValueError(f"{where} is {value!r:.100}, not a printable name")
    return value


def _word(value: Any, where: str) -> str | int | None:
    return value if value is None else _name(value, where) if isinstance(value, str) else _count(value, where)


def _optional(check: _Check) -> _Check:
    return lambda value, where: None if value is None else check(value, where)


def _list(check: _Check, length: int | None = None, at_most: int | None = None) -> _Check:
    def checked(value: Any, where: str) -> list[Any]:
        if not isinstance(value, list):
            raise ValueError(f"{where} is {value!r:.100}, not a list")
        if (length is not None and len(value) != length) or (at_most is not None and len(value) > at_most):
            raise ValueError(f"{where} has {len(value)} entries")
        return [check(item, where) for item in value]

    return checked
