"""Reads `index.json` and checks every field once, before it is used. Torch-free.

A checkpoint may come from a stranger, who can compute a valid sha256 for any content. An index that passes has the
types, ranges and printable names on which the rest of the package relies.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections import Counter
from itertools import product
from math import isfinite
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
    StoredPart,
    StoredTensor,
    broken,
)
from parallelrun.checkpoint.validation import (
    Check,
    as_object,
    count,
    integer,
    list_of,
    optional,
    parse,
    positive,
    printable_name,
    same_keys,
    word,
)
from parallelrun.errors import CheckpointError, Problem

MAX_INDEX_BYTES = 2**28
_MAX_DIMS = 8
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NEEDED = ("step", "global_batch", "scaler")  # fields of `extra` without which training cannot resume
_FIELDS = ("sha256", "schema", "format", "step", "optimizer", "plan", "extra", "tensors", "files")


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


def decode(raw: bytes, path: Path) -> Index:
    """Parse and check the content of an index file. Raises CheckpointError if any bit of it has changed."""
    if not raw.startswith(PREFIX):
        raise broken(path, "it is not the index of a parallelrun checkpoint")
    expected = raw[HASH_SPAN]
    found = hashlib.sha256(raw[: HASH_SPAN.start] + NO_HASH + raw[HASH_SPAN.stop :]).hexdigest()
    if expected != found.encode():
        raise broken(path, f"its sha256 is {found}, expected {expected.decode(errors='replace')}")
    try:
        return _index(parse(raw), found)
    except ValueError as error:  # another program wrote it, with a valid hash
        raise broken(path, f"its content is invalid ({error})") from error


def check_training(index: Index, path: Path) -> None:
    """Raise CheckpointError unless the checkpoint has the fields from which a training resumes."""
    missing = [f"extra.{key}" for key in _NEEDED if key not in index.extra]
    if missing:
        raise broken(path / INDEX_FILE, f"it has no {', '.join(missing)}, so no training can resume from it")


def _index(body: Any, digest: str) -> Index:
    fields = as_object(body, "the index")
    same_keys(fields, _FIELDS, "the index")
    if fields["schema"] != SCHEMA or fields["format"] != FORMAT:
        raise ValueError(f"schema {fields['schema']!r:.50} of {fields['format']!r:.50}, known is {SCHEMA}")
    step = count(fields["step"], "step")
    extra = _extra(fields["extra"], step)
    files = {name: _file(value, name) for name, value in as_object(fields["files"], "files").items()}
    tensors = {key: _tensor(value, key, files) for key, value in as_object(fields["tensors"], "tensors").items()}
    used = {part.file for tensor in tensors.values() for part in tensor.parts}
    if unused := files.keys() - used:
        raise ValueError(f"no tensor is stored in {sorted(unused)[0]}")
    return Index(
        step, printable_name(fields["optimizer"], "optimizer"), _plan(fields["plan"]), extra, tensors, files, digest
    )


def _plan(value: Any) -> dict[str, Any]:
    """Check the description of the plan (`index.describe_plan`). It is informative, so any field may be absent."""
    checks: dict[str, Check[Any]] = {
        "world": positive,
        "degrees": lambda v, at: {printable_name(k, at): positive(d, f"{at}.{k}") for k, d in as_object(v, at).items()},
        "data": printable_name,
        "shard": optional(positive),
        "tensor": printable_name,
        "pipeline": printable_name,
        "chunks": optional(positive),
        "precision": printable_name,
    }
    plan = as_object(value, "plan")
    for key, item in plan.items():
        check: Check[Any] = checks.get(printable_name(key, "a field of plan"), word)
        check(item, f"plan.{key}")
    return plan


def _extra(value: Any, step: int) -> dict[str, Any]:
    """Check the fields of `extra` that a training reads. Others belong to the program that saved."""
    checks: dict[str, Check[Any]] = {
        "step": count,
        "samples": count,
        "global_batch": positive,
        "seed": integer,
        "dataset": _dataset,
        "scaler": _scaler,
        "kept": list_of(printable_name),
        "clocks": list_of(count),
    }
    extra = as_object(value, "extra")
    for key, check in checks.items():
        if key in extra:
            check(extra[key], f"extra.{key}")
    if extra.get("step", step) != step:
        raise ValueError(f"extra.step is {extra['step']}, step is {step}")
    return extra


def _dataset(value: Any, where: str) -> None:
    fields = as_object(value, where)
    same_keys(fields, ("name", "fingerprint"), where)
    printable_name(fields["name"], f"{where}.name")
    optional(printable_name)(fields["fingerprint"], f"{where}.fingerprint")


def _scaler(value: Any, where: str) -> None:
    fields = as_object(value, where)
    same_keys(fields, ("scale", "applied_in_a_row"), where)
    scale = fields["scale"]
    if type(scale) not in (int, float) or not isfinite(scale) or scale <= 0:
        raise ValueError(f"{where}.scale is {scale!r:.50}, not a positive number")
    count(fields["applied_in_a_row"], f"{where}.applied_in_a_row")


def _file(value: Any, name: str) -> tuple[int, str]:
    if not DATA_FILE.fullmatch(name):
        raise ValueError(f"a data file is called {name!r:.200}")
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError(f"{name} is not listed as [size, sha256]")
    sha256 = value[1]
    if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
        raise ValueError(f"the sha256 of {name} is {sha256!r:.100}")
    return count(value[0], f"the size of {name}"), sha256


def _tensor(value: Any, key: str, files: dict[str, tuple[int, str]]) -> StoredTensor:
    printable_name(key, "a tensor's name")
    if key.startswith("optimizer/") and key.count("/") < 2:
        raise ValueError(f"{key} is not optimizer/<kind>/<parameter>")
    fields = as_object(value, key)
    same_keys(fields, ("dtype", "shape", "parts"), key)
    if not isinstance(fields["dtype"], str) or fields["dtype"] not in DTYPES:
        raise ValueError(f"{key} has dtype {fields['dtype']!r:.50}")
    shape = tuple(list_of(count, at_most=_MAX_DIMS)(fields["shape"], f"shape of {key}"))
    parts = tuple(list_of(_part)(fields["parts"], key))
    stored_in = [part.file for part in parts]
    if strange := [name for name in stored_in if name not in files]:
        raise ValueError(f"{key} is stored in {strange[0]!r:.200}, which is not a data file")
    _check_cover(key, shape, parts)
    if len(set(stored_in)) < len(stored_in):
        raise ValueError(f"two parts of {key} are in one file")
    return StoredTensor(fields["dtype"], shape, parts)


def _part(value: Any, where: str) -> StoredPart:
    fields = as_object(value, f"a part of {where}")
    same_keys(fields, ("offsets", "sizes", "file"), f"a part of {where}")
    if not isinstance(fields["file"], str):
        raise ValueError(f"a data file of {where} is called {fields['file']!r:.200}")
    numbers = list_of(count, at_most=_MAX_DIMS)
    offsets, sizes = (tuple(numbers(fields[key], f"{key} of {where}")) for key in ("offsets", "sizes"))
    return StoredPart(offsets, sizes, fields["file"])


def _check_cover(key: str, shape: tuple[int, ...], parts: tuple[StoredPart, ...]) -> None:
    """Raise ValueError unless the parts cover the shape, each element exactly once.

    A box has the corner values +1 at its start and -1 at its stop in each dim. The indicator functions of the parts sum
    to that of the shape exactly if the corner values do.
    """
    corners: Counter[tuple[int, ...]] = Counter()
    boxes = [(-1, (0,) * len(shape), shape), *((1, part.offsets, part.sizes) for part in parts)]
    fits = all(len(part.offsets) == len(part.sizes) == len(shape) for part in parts)
    for sign, offsets, sizes in boxes if fits else ():
        for ends in product((0, 1), repeat=len(shape)):
            corner = tuple(o + n * end for o, n, end in zip(offsets, sizes, ends))
            corners[corner] += sign * (-1) ** sum(ends)
    if not fits or any(corners.values()):
        raise ValueError(f"the parts of {key} do not cover its shape exactly once {list(shape)}")
