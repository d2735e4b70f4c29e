"""Documents of files, one after the other and without loading a file as a whole: text, jsonl, parquet and arrow.

Also finds the files: of a folder, or of a dataset that Hugging Face `datasets` saved (`save_to_disk`).
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from parallelrun.base.errors import ConfigError, DataError, EnvironmentProblem, Problem
from parallelrun.base.user_code import absence
from parallelrun.data.files import list_files

TEXT_PIECE = 2**22  # bytes of a text file that are encoded at once: it is cut after the last line that fits
ROWS_AT_ONCE = 256  # of parquet and arrow
SAVED = ("state.json", "dataset_info.json")  # of `Dataset.save_to_disk`
SAVED_SPLITS = "dataset_dict.json"  # of `DatasetDict.save_to_disk`
BESIDE_DATA = frozenset({*SAVED, "dataset_infos.json", "README.md", "LICENSE"})  # of a folder of jsonl, parquet, ...
DEFAULT_SPLIT = "train"
_SPLIT = re.compile(r"(?:^|[-_./ ])(train|test|validation|valid|val|dev|eval)(?=[-_./ ]|$)")  # in a file's name
_SAME = {"valid": "validation", "val": "validation", "dev": "validation", "eval": "test"}
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"  # of an arrow stream; one that was cut off between batches lacks it
_BOM = b"\xef\xbb\xbf"


class TextRow(NamedTuple):
    """A document, or a part of one. number: its line or row, from 1; 0: the file is one document. ends: with it."""

    text: bytes
    number: int
    ends: bool = True


@dataclass
class DocumentFile:
    """A file of documents. column: the field or column with the text. position: bytes of the file read so far."""

    path: Path
    column: str
    size: int
    position: int = field(default=0, init=False)

    @property
    def is_table(self) -> bool:
        """Whether its documents are rows; otherwise the whole file is one document."""
        return _reader(self.path) is not None

    def rows(self) -> Iterator[TextRow]:
        """The documents in order. Raises DataError naming the file and the line or row, OSError."""
        yield from (_reader(self.path) or _plain)(self)
        self.position = self.size

    @property
    def is_jsonl(self) -> bool:
        """Whether its rows are lines of JSON."""
        return _reader(self.path) is _jsonl

    def objects(self) -> Iterator[tuple[int, Any]]:
        """(number, JSON value) of each line of a jsonl file. Raises DataError naming the file and the line, OSError."""
        yield from _json_lines(self)
        self.position = self.size

    def place(self, number: int) -> str:
        """`FILE:LINE` of a text file, `FILE, row ROW` of another table."""
        if not number:
            return str(self.path)
        return f"{self.path}:{number}" if self.is_jsonl else f"{self.path}, row {number}"

    def broken(self, number: int, why: object) -> DataError:
        """The error about the document `number`."""
        return DataError(Problem(f"{self.place(number)}: {why}", "dataset.path"))


def find_documents(root: Path, column: str, split: str | None) -> tuple[list[DocumentFile], dict[str, int]]:
    """The files at `root` in order of their names, and the number of files of other splits, which are left out.

    split: of a folder whose files or folders are named by splits; None: `train`. Raises EnvironmentProblem, ConfigError
    for a split that is not there, OSError.
    """
    wanted = split or DEFAULT_SPLIT
    if (root / SAVED_SPLITS).is_file():
        names = _state(root / SAVED_SPLITS, "splits")
        if wanted not in names:
            raise _no_split(root, wanted, names)
        others = {name: 1 for name in names if name != wanted}
        return [_file(path, column) for path in _saved_files(root / wanted)], others
    if all((root / name).is_file() for name in SAVED):
        return [_file(path, column) for path in _saved_files(root)], {}
    documents = [_file(path, column) for path in list_files(root)]
    if root.is_file():
        return documents, {}
    if any(document.is_table for document in documents):
        documents = [document for document in documents if document.path.name not in BESIDE_DATA]
    splits = [
        _split_of(document.path.relative_to(root).as_posix()) if document.is_table else None for document in documents
    ]
    named = {name for name in splits if name is not None}
    if split is None and DEFAULT_SPLIT not in named:
        return documents, {}
    if wanted not in named:
        raise _no_split(root, wanted, sorted(named))
    of_split = [document for document, name in zip(documents, splits) if name in (None, wanted)]
    return of_split, {name: splits.count(name) for name in sorted(named - {wanted})}


def _file(path: Path, column: str) -> DocumentFile:
    return DocumentFile(path, column, path.stat().st_size)


def _split_of(name: str) -> str | None:
    match = _SPLIT.search(name)
    return _SAME.get(match[1], match[1]) if match else None


def _no_split(root: Path, wanted: str, names: Sequence[str]) -> ConfigError:
    message = f"{root} has no split {wanted}; it has {', '.join(names) or 'none'}"
    return ConfigError(Problem(message, "dataset.split", names[0] if names else ""))


def _saved_files(folder: Path) -> list[Path]:
    """The arrow files of a saved dataset. Raises DataError if one is missing."""
    if _state(folder / SAVED[0], "_indices_data_files"):
        message = f"{folder} was saved with a separate order of its rows"
        fix = "save it again: datasets.load_from_disk(PATH).flatten_indices().save_to_disk(OTHER)"
        raise EnvironmentProblem(Problem(message, "dataset.path", fix))
    paths = [folder / str(entry["filename"]) for entry in _state(folder / SAVED[0], "_data_files")]
    for path in paths:
        if path.parent != folder or not path.is_file():
            raise DataError(Problem(f"{folder / SAVED[0]} names {path.name}, which is not there", "dataset.path"))
    return paths


def _state(path: Path, key: str) -> Any:
    try:
        return json.loads(path.read_bytes()).get(key)
    except (ValueError, AttributeError) as error:
        raise DataError(Problem(f"{path} is damaged: {error}", "dataset.path")) from error


def _reader(path: Path) -> Callable[[DocumentFile], Iterator[TextRow]] | None:
    name = path.name.lower().removesuffix(".gz")
    if name.endswith((".jsonl", ".ndjson")):
        return _jsonl
    return {".parquet": _parquet, ".arrow": _arrow}.get(path.suffix.lower())


def _plain(file: DocumentFile) -> Iterator[TextRow]:
    """The file as one document, in parts that end with a line."""
    rest = b""
    with file.path.open("rb") as stream:
        while block := stream.read(TEXT_PIECE):
            file.position = stream.tell()
            rest += block
            cut = rest.rfind(b"\n") + 1
            if len(rest) >= TEXT_PIECE and 0 < cut < len(rest):
                yield TextRow(rest[:cut], 0, ends=False)
                rest = rest[cut:]
    yield TextRow(rest, 0)


def _jsonl(file: DocumentFile) -> Iterator[TextRow]:
    for number, document in _json_lines(file):
        yield TextRow(_text_of(document, file, number), number)


def _json_lines(file: DocumentFile) -> Iterator[tuple[int, Any]]:
    number = 0
    with file.path.open("rb") as raw:
        lines: Any = gzip.GzipFile(fileobj=raw) if file.path.suffix.lower() == ".gz" else raw
        try:
            for line in lines:
                number += 1
                if text := line.removeprefix(_BOM).strip() if number == 1 else line.strip():
                    file.position = raw.tell()
                    yield number, json.loads(text)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise file.broken(number + 1, f"the compressed file is damaged: {error}") from error
        except RecursionError as error:
            raise file.broken(number, "JSON that is nested too deeply") from error
        except UnicodeError as error:
            raise file.broken(number, f"no UTF-8 text: {error}") from error
        except ValueError as error:
            raise file.broken(number, f"no JSON: {error}") from error


def _text_of(document: Any, file: DocumentFile, number: int) -> bytes:
    if not isinstance(document, dict):
        raise file.broken(number, f"no JSON object with a {file.column!r}, but a {type(document).__name__}")
    if file.column not in document:
        message = f"{file.place(number)}: no JSON object with a {file.column!r}; it has {_listed(document)}"
        raise DataError(Problem(message, "dataset.column"))
    text = document[file.column]
    if not isinstance(text, str):
        raise file.broken(number, f"{file.column!r} is no string, but {json.dumps(text)[:40]}")
    try:
        return text.encode()
    except UnicodeError as error:
        raise file.broken(number, f"no UTF-8 text: {error}") from error


def _listed(names: Any) -> str:
    return ", ".join(map(repr, list(names)[:10])) or "nothing"


def _parquet(file: DocumentFile) -> Iterator[TextRow]:
    pyarrow = _pyarrow(file)
    import pyarrow.parquet as parquet

    def batches() -> Iterator[Any]:
        with parquet.ParquetFile(str(file.path), pre_buffer=False, buffer_size=2**20) as opened:
            _check_column(pyarrow, opened.schema_arrow, file)
            done, total = 0, max(1, opened.metadata.num_rows)
            for batch in opened.iter_batches(ROWS_AT_ONCE, columns=[file.column], use_threads=False):
                yield batch.column(0)
                done += batch.num_rows
                file.position = file.size * done // total

    yield from _of_columns(pyarrow, file, batches())


def _arrow(file: DocumentFile) -> Iterator[TextRow]:
    """Arrow's stream format, which `datasets` writes, or its file format."""
    pyarrow = _pyarrow(file)

    def batches() -> Iterator[Any]:
        with pyarrow.OSFile(str(file.path)) as raw:
            if raw.read(6) == b"ARROW1":
                opened = pyarrow.ipc.open_file(raw)
                each = map(opened.get_batch, range(opened.num_record_batches))
            else:
                raw.seek(0)
                each = opened = pyarrow.ipc.open_stream(raw)
            _check_column(pyarrow, opened.schema, file)
            for batch in each:
                column = batch.column(batch.schema.get_field_index(file.column))
                for start in range(0, len(column), ROWS_AT_ONCE):
                    yield column.slice(start, ROWS_AT_ONCE)
                file.position = raw.tell()
            if each is opened:
                raw.seek(max(0, file.size - len(_END_OF_STREAM)))
                if raw.read(len(_END_OF_STREAM)) != _END_OF_STREAM:
                    raise ValueError("the file ends before the mark of its end")

    yield from _of_columns(pyarrow, file, batches())


def _of_columns(pyarrow: Any, file: DocumentFile, columns: Iterator[Any]) -> Iterator[TextRow]:
    number = 0
    while True:
        try:
            column = next(columns, None)
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            after = f"damaged after row {number}" if number else "damaged"
            raise DataError(Problem(f"{file.path}: {after}: {error}", "dataset.path")) from error
        if column is None:
            return
        for text in column.cast(pyarrow.large_string()).cast(pyarrow.large_binary()).to_pylist():
            number += 1
            if text is None:
                raise file.broken(number, f"{file.column!r} is no string, but null")
            yield TextRow(text, number)


def _check_column(pyarrow: Any, schema: Any, file: DocumentFile) -> None:
    texts = [field.name for field in schema if _is_text(pyarrow, field.type)]
    if file.column in texts:
        return
    is_there = file.column in schema.names
    message = f"is a column of {schema.field(file.column).type}, not of text" if is_there else "is no column"
    columns = f"its columns of text: {_listed(texts)}"
    raise ConfigError(
        Problem(f"{file.column!r} {message} of {file.path}; {columns}", "dataset.column", ", ".join(texts))
    )


def _is_text(pyarrow: Any, kind: Any) -> bool:
    kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
    return any(str(kind) == name for name in ("string", "large_string", "string_view"))


def _pyarrow(file: DocumentFile) -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError as error:
        message = f"{file.path} needs {absence('pyarrow', error)}"
        raise EnvironmentProblem(Problem(message, "dataset.path", command="pip install 'parallelrun[data]'")) from error
    return pyarrow
