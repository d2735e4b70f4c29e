"""`dataset=pystdlib`: the source text of the running Python's standard library. Real text, present on every machine."""

from __future__ import annotations

import os
import sysconfig
from functools import lru_cache
from pathlib import Path

from parallelrun.base.errors import EnvironmentProblem, Problem
from parallelrun.config.schema.run_schema import Config
from parallelrun.data import files
from parallelrun.data.tokenizing.tokenizer import NUM_BYTES
from parallelrun.planner.model.definitions import BYTES, Dataset, DatasetDefinition, TextTokens
from parallelrun.planner.model.model_spec import ModelSpec

DEFAULT_MAX_BYTES = 8 * 2**20
LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


class StandardLibrary(DatasetDefinition):
    """The first `dataset.max_bytes` (default 8 MiB) of the library's .py files in order of their names, as bytes.

    Files are never cut, and belong to train or val by the hash of their name.
    """

    kinds = ("tokens",)
    packs = True

    def vocab_size(self, config: Config) -> int:
        return NUM_BYTES

    def tokenizer(self, config: Config) -> TextTokens:
        return TextTokens(BYTES)

    def open(self, config: Config, spec: ModelSpec) -> Dataset:
        folder = Path(sysconfig.get_path("stdlib"))
        limit = DEFAULT_MAX_BYTES if config.dataset.max_bytes is None else config.dataset.max_bytes
        texts, fingerprint = _read(folder, limit)
        if not texts:
            message = f"no Python source file within {limit} bytes under {folder}"
            raise EnvironmentProblem(Problem(message, "dataset", "dataset=text path=FILE_OR_FOLDER"))
        size = sum(file.content.size for file in texts)
        source = f"the standard library at {folder} ({len(texts)} files, {size} bytes)"
        return files.open_files(texts, fingerprint, config, spec, source)


@lru_cache(maxsize=2)
def _read(folder: Path, limit: int) -> tuple[tuple[files.ByteFile, ...], str]:
    paths: list[str] = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in LEFT_OUT]
        paths += [os.path.join(parent, name) for name in names if name.endswith(".py")]
    texts, used = [], 0
    for name in sorted(path[len(str(folder)) + 1 :] for path in paths):
        file = files.read_file(folder / name, name)
        used += file.content.size
        if used > limit:
            break
        texts.append(file)
    return tuple(texts), files.fingerprint(texts)


DATASET = StandardLibrary()
