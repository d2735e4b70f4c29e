"""`dataset=text path=FILE_OR_FOLDER`: any files as byte-level tokens."""

from __future__ import annotations

from pathlib import Path

from parallelrun.config.schema import Config
from parallelrun.data import files
from parallelrun.definitions import Dataset, DatasetDefinition
from parallelrun.model_spec import ModelSpec


class TextFiles(DatasetDefinition):
    """The bytes of a file, or of every file under a folder (hidden ones left out) in order of their names.

    `dataset.max_bytes` limits the total.
    """

    reads_path = reads_bytes = True

    def vocab_size(self, config: Config) -> int:
        return files.NUM_BYTES

    def open(self, config: Config, spec: ModelSpec) -> Dataset:
        root = files.resolve_path(config, "a file or a folder of text")
        found = _read(root, config.dataset.max_bytes)
        size = sum(file.content.size for file in found)
        source = f"{root} ({len(found)} files, {size} bytes)"
        if not size:
            raise files.path_problem(f"{source} holds no text")
        return files.open_files(found, files.fingerprint(found), config, spec, source)


def _read(root: Path, max_bytes: int | None) -> list[files.ByteFile]:
    found: list[files.ByteFile] = []
    left = max_bytes
    try:
        for path in files.list_files(root):
            if left is not None and left <= 0:
                break
            name = path.relative_to(root).as_posix() if path != root else path.name
            found.append(files.read_file(path, name, left))
            left = None if left is None else left - found[-1].content.size
    except OSError as error:
        raise files.path_problem(f"cannot read {error.filename or root}: {error.strerror}") from error
    return found


DATASET = TextFiles()
