"""Files as data: resolved paths, hashes, and bytes as tokens."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallelrun.base.errors import EnvironmentProblem, Problem
from parallelrun.config.schema.run_schema import Config
from parallelrun.data.arrays import NDArray, np
from parallelrun.data.tokenizing.tokenizer import NUM_BYTES
from parallelrun.data.tokens import Documents
from parallelrun.planner.model.definitions import Dataset
from parallelrun.planner.model.model_spec import ModelSpec

# A file up to this size is hashed; of a larger one only its size, first and last mebibyte, so that opening is fast.
FULL_HASH_BYTES = 64 * 2**20


def path_problem(what: str, suggestion: str = "", command: str = "") -> EnvironmentProblem:
    """The error about a file below `dataset.path`."""
    return EnvironmentProblem(Problem(what, "dataset.path", suggestion, command))


def resolve_path(config: Config, wanted: str) -> Path:
    """`dataset.path` as an absolute path, `~` expanded. Raises EnvironmentProblem when it was not given."""
    name = config.dataset.name
    if not config.dataset.path:
        raise path_problem(f"dataset={name} needs {wanted}", command=f"parallelrun dataset={name} path=PATH")
    return Path(os.path.abspath(Path(config.dataset.path).expanduser()))


def list_files(root: Path) -> list[Path]:
    """The file itself, or a folder's files by name without hidden ones. Raises EnvironmentProblem, OSError."""
    if not root.exists():
        raise path_problem(f"no such file or folder: {root}")
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise path_problem(f"neither a file nor a folder: {root}")

    def fail(error: OSError) -> None:
        raise error

    paths = []
    for parent, folders, names in os.walk(root, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths += [Path(parent, name) for name in names if not name.startswith(".")]
    return sorted((path for path in paths if path.is_file()), key=lambda path: path.relative_to(root).as_posix())


def hash_name(name: str) -> int:
    """A stable 64-bit hash of a file's name."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def digest_array(content: NDArray[Any]) -> bytes:
    """sha256 of an array's size and bytes (of its ends only, when it is larger than `FULL_HASH_BYTES`)."""
    flat: Any = memoryview(np.asarray(content).view(np.uint8).data)
    digest = hashlib.sha256(f"{flat.nbytes}:".encode())
    for part in (flat,) if flat.nbytes <= FULL_HASH_BYTES else (flat[: 2**20], flat[-(2**20) :]):
        digest.update(part)
    return digest.digest()


@dataclass(frozen=True)
class ByteFile:
    """A file's bytes (uint8, in memory or mapped) under a name that does not depend on the folder's own path."""

    name: str
    path: str
    content: NDArray[np.uint8]


def read_file(path: Path, name: str, max_bytes: int | None = None) -> ByteFile:
    """The first `max_bytes` of a file: read when small, memory-mapped when not. Raises OSError."""
    size = path.stat().st_size
    size = size if max_bytes is None else min(size, max_bytes)
    if size > 2**20:
        return ByteFile(name, str(path), np.memmap(path, dtype=np.uint8, mode="r", shape=(size,)))
    with path.open("rb") as stream:
        return ByteFile(name, str(path), np.frombuffer(stream.read(size), dtype=np.uint8))


def fingerprint(files: Sequence[ByteFile]) -> str:
    """sha256 over the names and contents of all files, in order."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + digest_array(file.content))
    return digest.hexdigest()


def open_files(files: Sequence[ByteFile], fingerprint: str, config: Config, spec: ModelSpec, source: str) -> Dataset:
    """Windows over the files' bytes; train and val by hash of the file, or of fixed-size pieces when files are few."""
    names = [file.name for file in files] if len(files) > 1 else [""]  # renaming a lone file keeps its splits
    documents = Documents(
        sources=[file.content for file in files],
        names=tuple(file.path for file in files),
        source_of=np.arange(len(files)),
        starts=np.zeros(len(files), dtype=np.int64),
        lengths=np.array([file.content.size for file in files], dtype=np.int64),
        keys=np.array([hash_name(name) for name in names], dtype=np.uint64),
    )
    return documents.open(NUM_BYTES, fingerprint, config, spec, source)
