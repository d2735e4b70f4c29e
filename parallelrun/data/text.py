"""`dataset=text path=FILE_OR_FOLDER`: any files as byte-level tokens."""

from __future__ import annotations

import os
from pathlib import Path

from parallelrun.config.schema import Config
from parallelrun.data import byte_files
from parallelrun.data.dataset import Dataset
from parallelrun.errors import EnvironmentProblem, Problem
from parallelrun.model_spec import ModelSpec


def vocab_size(config: Config) -> int:
    """Bytes: 256."""
    return byte_files.VOCAB


def open(config: Config, spec: ModelSpec) -> Dataset:
    """The bytes of a file, or of every file under a folder (hidden ones left out) in order of their names.

    `dataset.max_bytes` limits the total. Raises EnvironmentProblem with the resolved path when it is missing, not
    readable, empty, or too small for a global batch.
    """
    root = resolve_path(config, "a file or a folder of text")
    files = _read(root, config.dataset.max_bytes)
    size = sum(file.content.size for file in files)
    source = f"{root} ({len(files)} files, {size} bytes)"
    if not size:
        raise EnvironmentProblem(Problem(f"{source} holds no text", where="dataset.path"))
    return byte_files.open_files("text", files, byte_files.fingerprint(files), config, spec, source)


def resolve_path(config: Config, wanted: str) -> Path:
    """`dataset.path` as an absolute path, `~` expanded. Raises EnvironmentProblem when it was not given."""
    if not config.dataset.path:
        raise EnvironmentProblem(
            Problem(
                f"dataset={config.dataset.name} needs {wanted}",
                where="dataset.path",
                command=f"parallelrun dataset={config.dataset.name} path=PATH",
            )
        )
    return Path(os.path.abspath(Path(config.dataset.path).expanduser()))


def list_files(root: Path) -> list[Path]:
    """The file itself, or a folder's files by name without hidden ones. Raises EnvironmentProblem, OSError."""
    if not root.exists():
        raise EnvironmentProblem(Problem(f"no such file or folder: {root}", where="dataset.path"))
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise EnvironmentProblem(Problem(f"neither a file nor a folder: {root}", where="dataset.path"))

    def fail(error: OSError) -> None:
        raise error

    found = []
    for parent, folders, names in os.walk(root, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(parent, name) for name in names if not name.startswith(".")]
    return sorted((path for path in found if path.is_file()), key=lambda path: path.relative_to(root).as_posix())


def _read(root: Path, max_bytes: int | None) -> tuple[byte_files.File, ...]:
    files: list[byte_files.File] = []
    left = max_bytes
    try:
        for path in list_files(root):
            if left is not None and left <= 0:
                break
            name = path.relative_to(root).as_posix() if path != root else path.name
            files.append(byte_files.read_file(path, name, left))
            if left is not None:
                left -= files[-1].content.size
    except OSError as error:
        raise EnvironmentProblem(
            Problem(f"cannot read {error.filename or root}: {error.strerror}", where="dataset.path")
        ) from error
    return tuple(files)
