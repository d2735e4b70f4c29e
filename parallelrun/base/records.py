"""Writing a run's JSON files: atomically, with `schema: 1`; dataclasses read from them; the hash of any file.

JSON has no non-finite numbers: they become null, and the top-level object gets `nonfinite: true`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import math
import os
import re
import tempfile
from collections import deque
from collections.abc import Callable, Mapping
from itertools import repeat
from pathlib import Path
from types import UnionType
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

SCHEMA = 1
_SECRET = re.compile(r"(^|[._-])(api_?key|key|token|secret|passwords?|passwd|credentials?)s?($|[._-])", re.IGNORECASE)


def document(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return `fields` as a plain JSON object with `schema` first.

    Scalars of numpy and torch, paths and dataclasses are converted. Raises TypeError for values that JSON cannot hold.
    """
    nonfinite: list[bool] = []
    plain: dict[str, Any] = _plain({"schema": SCHEMA, **fields}, nonfinite)
    if nonfinite:
        plain["nonfinite"] = True
    return plain


def write_json(path: str | os.PathLike[str], fields: Mapping[str, Any]) -> None:
    """Write `document(fields)` to `path`: readers see either the old file or the complete new one. Raises OSError."""
    text = json.dumps(document(fields), indent=2, allow_nan=False) + "\n"
    write_text(path, text)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Replace `path` atomically by a private (0600) file with `text`. Raises OSError."""
    write_bytes(path, text.encode())


def write_bytes(path: str | os.PathLike[str], content: bytes) -> None:
    """Replace `path` atomically by a private (0600) file with `content`. Raises OSError."""
    path = Path(path)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def redact(argument: str) -> str:
    """Return `argument` without secrets: `tracker.api_key=<redacted>`; passwords in URLs are removed, too."""
    key, separator, _ = argument.partition("=")
    if separator and _SECRET.search(key):
        return f"{key}=<redacted>"
    return _without_password(argument)


def redacted(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` without secrets: texts of keys such as `api_key`, and passwords in URLs, at any depth."""

    def hidden(key: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return redacted(value)
        if isinstance(value, (list, tuple)):
            return [hidden(key, item) for item in value]
        if isinstance(value, str):
            return "<redacted>" if _SECRET.search(key) else _without_password(value)
        return value

    return {key: hidden(str(key), value) for key, value in values.items()}


def _without_password(text: str) -> str:
    return re.sub(r"(://[^/\s:@]*:)[^/\s@]+@", r"\1<redacted>@", text)


def typed(kind: Any, value: Any) -> Any:
    """Return the `kind` of value that was written as JSON: a dataclass, a tuple or an optional one, and those in it.

    Raises KeyError, TypeError or AttributeError for values of another form.
    """
    items = get_args(kind)
    if get_origin(kind) in (Union, UnionType):
        return None if value is None else typed(next(item for item in items if item is not type(None)), value)
    if get_origin(kind) is tuple:
        return tuple(typed(item, part) for item, part in zip(repeat(items[0]) if items[-1] is ... else items, value))
    if dataclasses.is_dataclass(kind):
        return cast(Any, kind)(**{name: typed(hint, value[name]) for name, hint in get_type_hints(kind).items()})
    return value


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file in hexadecimal. Raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def append_jsonl(path: str | os.PathLike[str], fields: Mapping[str, Any]) -> None:
    """Append `document(fields)` as one line, in one write, so that the file never has part of a line. Raises OSError.

    A disk that fills up may accept part of the line; that part is removed again.
    """
    line = json.dumps(document(fields), allow_nan=False) + "\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        encoded = line.encode()
        before = os.fstat(descriptor).st_size
        if os.write(descriptor, encoded) < len(encoded):
            os.ftruncate(descriptor, before)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(path))
    finally:
        os.close(descriptor)


class RowFile:
    """A file of JSON lines. Rows that a full disk rejects are kept in memory and written when there is room again."""

    def __init__(self, path: str | os.PathLike[str]):
        self._path = path
        self._kept: deque[Mapping[str, Any]] = deque()

    @property
    def num_kept(self) -> int:
        """The number of rows that wait for room on the disk."""
        return len(self._kept)

    def append(self, fields: Mapping[str, Any]) -> None:
        """Write the rows that wait and then this one. Rows that cannot be written are kept."""
        self._kept.append(fields)
        with contextlib.suppress(OSError):
            self.flush()

    def keep(self, wanted: Callable[[Mapping[str, Any]], bool]) -> None:
        """Remove all rows that are not `wanted`, from the file and from those that wait. Raises OSError."""
        self._kept = deque(row for row in self._kept if wanted(row))
        path = Path(self._path)
        if path.exists():
            lines = path.read_text().splitlines(keepends=True)
            write_text(path, "".join(line for line in lines if wanted(json.loads(line))))

    def flush(self) -> None:
        """Write the rows that wait. Raises OSError."""
        while self._kept:
            append_jsonl(self._path, self._kept[0])
            self._kept.popleft()


def _plain(value: Any, nonfinite: list[bool]) -> Any:
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        nonfinite.append(True)
        return None
    if isinstance(value, Mapping):
        return {str(key): _plain(item, nonfinite) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item, nonfinite) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return _plain(fields, nonfinite)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "item"):  # a numpy or torch scalar
        return _plain(value.item(), nonfinite)
    raise TypeError(f"JSON cannot hold {type(value).__name__}: {value!r}")
