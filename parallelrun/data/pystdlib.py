"""`dataset=pystdlib`: the source text of the running Python's standard library. Real text, present on every machine."""

from __future__ import annotations

import os
import sysconfig
from functools import lru_cache
from pathlib import Path

from parallelrun.config.schema import Config
from parallelrun.data import byte_files
from parallelrun.data.dataset import Dataset
from parallelrun.errors import EnvironmentProblem, Problem
from parallelrun.model_spec import ModelSpec

DEFAULT_MAX_BYTES = 8 * 2**20
LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


def vocab_size(config: Config) -> int:
    """Bytes: 256."""
    return byte_files.VOCAB


def open(config: Config, spec: ModelSpec) -> Dataset:
    """The first `dataset.max_bytes` (default 8 MiB) of the library's .py files in order of their names.

    Files are whole, and belong to train or val by the hash of their name. Raises EnvironmentProblem when this Python
    ships no source files.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    limit = DEFAULT_MAX_BYTES if config.dataset.max_bytes is None else config.dataset.max_bytes
    files, fingerprint = _read(folder, limit)
    if not files:
        raise EnvironmentProblem(
            Problem(
                f"no Python source file within {limit} bytes under {folder}",
                where="dataset",
                suggestion="dataset=text path=FILE_OR_FOLDER",
            )
        )
    size = sum(file.content.size for file in files)
    source = f"the standard library at {folder} ({len(files)} files, {size} bytes)"
    return byte_files.open_files("pystdlib", files, fingerprint, config, spec, source)


@lru_cache(maxsize=2)
def _read(folder: Path, limit: int) -> tuple[tuple[byte_files.File, ...], str]:
    paths = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in LEFT_OUT]
        paths += [Path(parent, name) for name in names if name.endswith(".py")]
    files, used = [], 0
    for path in sorted(paths, key=lambda path: path.relative_to(folder).as_posix()):
        file = byte_files.read_file(path, path.relative_to(folder).as_posix())
        used += file.content.size
        if used > limit:
            break
        files.append(file)
    return tuple(files), byte_files.fingerprint(files)
