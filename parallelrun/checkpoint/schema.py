"""Writes `index.json`, reads it and checks every field once, before it is used.

A checkpoint may come from a stranger, who can compute a valid sha256 for any content. An index that passes has the
types, ranges and printable names on which the rest of the package relies.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections import Counter
from copy import deepcopy
from dataclasses import replace
from functools import lru_cache
from itertools import product
from math import isfinite, prod
from pathlib import Path
from typing import Any

from parallelrun.base import forms
from parallelrun.base.errors import CheckpointError, Problem
from parallelrun.base.forms import Form, Leaf
from parallelrun.checkpoint.index import DATA_FILE, DTYPES, INDEX_FILE, Index, StoredPart, StoredTensor, broken
from parallelrun.config.stored_tensors import read_header

SCHEMA = 1
FORMAT = "parallelrun checkpoint"
_PREFIX = b'{"sha256": "'
_HASH_SPAN = slice(len(_PREFIX), len(_PREFIX) + 64)
_NO_HASH = b"0" * 64
MAX_INDEX_BYTES = 2**28
_REMEMBERED_BYTES = 2**20  # of an index: it takes some ten times the memory when it is read
_NEEDED = ("step", "global_batch", "scaler")  # fields of `extra` without which training cannot resume
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SCALE = Leaf("a positive number", lambda value: type(value) in (int, float) and isfinite(value) and value > 0)
_PLAIN = Leaf(
    "a plain value",
    lambda value: (
        value is None or forms.printable.holds(value) or (type(value) in (bool, int, float) and isfinite(value))
    ),
)
_FILE = Leaf(
    "[size, sha256]",
    lambda value: (
        isinstance(value, list)
        and len(value) == 2
        and forms.count.holds(value[0])
        and isinstance(value[1], str)
        and _SHA256.fullmatch(value[1]) is not None
    ),
)
_INDEX: Form = {
    "sha256": forms.anything,
    "schema": forms.anything,
    "format": forms.anything,
    "step": forms.count,
    "optimizer": forms.printable,
    "plan": {"degrees?": {"*": forms.positive}, "*": _PLAIN},  # `index.describe_plan`, for messages only
    "extra": {  # the fields that a training reads; others belong to the program that saved
        "step?": forms.count,
        "samples?": forms.count,
        "global_batch?": forms.positive,
        "seed?": forms.integer,
        "dataset?": {
            "name": forms.printable,
            "fingerprint": forms.optional(forms.printable),
            "tokenizer?": forms.optional(forms.printable),
            "settings?": {"*": _PLAIN},
        },
        "scaler?": {"scale": _SCALE, "applied_in_a_row": forms.count},
        "kept?": [forms.printable],
        "clocks?": [forms.count],
        "*": forms.anything,
    },
    "tensors": {
        "*": {
            "dtype": Leaf("a known dtype", lambda value: isinstance(value, str) and value in DTYPES),
            "shape": forms.dims,
            "parts": [{"offsets": forms.dims, "sizes": forms.dims, "file": forms.string}],
        }
    },
    "files": {"*": _FILE},
}
_HEADER: Form = {"*": {"dtype": forms.string, "shape": forms.dims, "data_offsets": forms.dims}}  # of a safetensors file


def read_index(path: Path) -> Index:
    """Read and check the index of a checkpoint directory. Raises CheckpointError if it is missing or damaged."""
    file = path / INDEX_FILE
    try:
        # O_NONBLOCK: opening a pipe must not wait for its writer.
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        with os.fdopen(descriptor, "rb") as stream:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise broken(file, "it is not a regular file")
            if status.st_size > MAX_INDEX_BYTES:
                raise broken(file, f"it has {status.st_size} bytes, at most {MAX_INDEX_BYTES} are read")
            return decode(stream.read(MAX_INDEX_BYTES), file)
    except FileNotFoundError as error:
        raise CheckpointError(Problem(f"{path} is incomplete or not a checkpoint: it has no {INDEX_FILE}")) from error
    except OSError as error:
        raise CheckpointError(Problem(f"cannot read {file}: {error.strerror}")) from error


def encode(index: Index) -> bytes:
    """Return the file's content: a JSON object that begins with its sha256, computed with zeros in that place."""
    body: dict[str, Any] = {"sha256": _NO_HASH.decode(), "schema": SCHEMA, "format": FORMAT}
    body |= {"step": index.step, "optimizer": index.optimizer, "plan": dict(index.plan), "extra": dict(index.extra)}
    body["tensors"] = {key: {**vars(t), "parts": [vars(part) for part in t.parts]} for key, t in index.tensors.items()}
    body["files"] = dict(index.files)
    raw = json.dumps(body, allow_nan=False).encode()
    assert raw.startswith(_PREFIX + _NO_HASH)
    return raw[: _HASH_SPAN.start] + hashlib.sha256(raw).hexdigest().encode() + raw[_HASH_SPAN.stop :]


def decode(raw: bytes, path: Path) -> Index:
    """Parse and check the content of an index file. Raises CheckpointError if any bit of it has changed."""
    if not raw.startswith(_PREFIX):
        raise broken(path, "it is not the index of a parallelrun checkpoint")
    expected = raw[_HASH_SPAN]
    digest = hashlib.sha256(raw[: _HASH_SPAN.start] + _NO_HASH + raw[_HASH_SPAN.stop :]).hexdigest()
    if expected != digest.encode():
        raise broken(path, f"its sha256 is {digest}, expected {expected.decode(errors='replace')}")
    read = _index_of if len(raw) <= _REMEMBERED_BYTES else _index_of.__wrapped__
    try:
        index = read(raw, digest)
    except ValueError as error:  # another program wrote it, with a valid hash
        raise broken(path, f"its content is invalid ({error})") from error
    return replace(index, plan=deepcopy(index.plan), extra=deepcopy(index.extra))  # nobody changes another's


@lru_cache(maxsize=8)  # every save of a run looks at the checkpoints before it, and a load at its own several times
def _index_of(raw: bytes, digest: str) -> Index:
    return _index(forms.parse(raw), digest)


def check_training(index: Index, path: Path) -> None:
    """Raise CheckpointError unless the checkpoint has the fields from which a training resumes."""
    missing = [f"extra.{key}" for key in _NEEDED if key not in index.extra]
    if missing:
        raise broken(path / INDEX_FILE, f"it has no {', '.join(missing)}, so no training can resume from it")


def _index(body: Any, digest: str) -> Index:
    forms.check(body, _INDEX, "the index")
    if body["schema"] != SCHEMA or body["format"] != FORMAT:
        raise ValueError(f"schema {body['schema']!r:.50} of {body['format']!r:.50}, known is {SCHEMA}")
    step, extra = body["step"], body["extra"]
    if extra.get("step", step) != step:
        raise ValueError(f"extra.step is {extra['step']}, step is {step}")
    files = {file: (size, sha256) for file, (size, sha256) in body["files"].items()}
    if wrong := [file for file in files if not DATA_FILE.fullmatch(file)]:
        raise ValueError(f"a data file is called {wrong[0]!r:.200}")
    tensors = {key: _tensor(fields, key, files) for key, fields in body["tensors"].items()}
    used = {part.file for tensor in tensors.values() for part in tensor.parts}
    if unused := files.keys() - used:
        raise ValueError(f"no tensor is stored in {sorted(unused)[0]}")
    return Index(step, body["optimizer"], body["plan"], extra, tensors, files, digest)


def _tensor(fields: dict[str, Any], key: str, files: dict[str, tuple[int, str]]) -> StoredTensor:
    if key.startswith("optimizer/") and key.count("/") < 2:
        raise ValueError(f"{key} is not optimizer/<kind>/<parameter>")
    shape = tuple(fields["shape"])
    parts = tuple(StoredPart(tuple(p["offsets"]), tuple(p["sizes"]), p["file"]) for p in fields["parts"])
    stored_in = [part.file for part in parts]
    if strange := [file for file in stored_in if file not in files]:
        raise ValueError(f"{key} is stored in {strange[0]!r:.200}, which is not a data file")
    _check_cover(key, shape, parts)
    if len(set(stored_in)) < len(stored_in):
        raise ValueError(f"two parts of {key} are in one file")
    return StoredTensor(fields["dtype"], shape, parts)


def _check_cover(key: str, shape: tuple[int, ...], parts: tuple[StoredPart, ...]) -> None:
    """Raise ValueError unless the parts cover the shape, each element exactly once.

    A box has the corner values +1 at its start and -1 at its stop in each dim. The indicator functions of the parts sum
    to that of the shape exactly if the corner values do.
    """
    if len(parts) == 1 and parts[0].sizes == shape and parts[0].offsets == (0,) * len(shape):
        return
    corners: Counter[tuple[int, ...]] = Counter()
    boxes = [(-1, (0,) * len(shape), shape), *((1, part.offsets, part.sizes) for part in parts)]
    fits = all(len(part.offsets) == len(part.sizes) == len(shape) for part in parts)
    for sign, offsets, sizes in boxes if fits else ():
        for ends in product((0, 1), repeat=len(shape)):
            corner = tuple(o + n * end for o, n, end in zip(offsets, sizes, ends))
            corners[corner] += sign * (-1) ** sum(ends)
    if not fits or any(corners.values()):
        raise ValueError(f"the parts of {key} do not cover its shape exactly once {list(shape)}")


def check_header(index: Index, path: Path, name: str) -> None:
    """Raise CheckpointError unless a data file's header has the keys, dtypes and shapes of the index."""
    file = path / name
    expected = {
        key: (*DTYPES[tensor.dtype], part.sizes)
        for key, tensor in index.tensors.items()
        for part in tensor.parts
        if part.file == name
    }
    try:
        with file.open("rb") as stream:
            _check_entries(*read_header(stream), expected)
    except OSError as error:
        raise CheckpointError(Problem(f"cannot read {file}: {error.strerror}")) from error
    except ValueError as error:
        raise broken(file, f"its header differs from {INDEX_FILE} ({error})") from error


def _check_entries(header: Any, num_bytes: int, expected: dict[str, tuple[str, int, tuple[int, ...]]]) -> None:
    if isinstance(header, dict):
        header.pop("__metadata__", None)
    forms.check(header, _HEADER, "the header")
    if header.keys() != expected.keys():
        other = sorted(header.keys() ^ expected.keys())
        raise ValueError(f"{len(other)} tensors are in only one of the two, the first is {other[0]!r:.200}")
    end = 0
    for key, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        dtype, itemsize, sizes = expected[key]
        if entry["dtype"] != dtype or tuple(entry["shape"]) != sizes:
            raise ValueError(f"{key} is {entry['dtype']:.50} {entry['shape']}, expected {dtype} {list(sizes)}")
        if entry["data_offsets"] != [end, end + prod(sizes) * itemsize]:
            raise ValueError(f"{key} is stored at bytes {entry['data_offsets']}, expected from {end} on, without gaps")
        end += prod(sizes) * itemsize
    if end != num_bytes:
        raise ValueError(f"its tensors have {end} bytes, the file holds {num_bytes}")
