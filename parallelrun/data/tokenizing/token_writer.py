"""Writes documents as Megatron's token files, with a note about them: PREFIX.bin, PREFIX.idx and PREFIX.json."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallelrun.base.errors import ConfigError, Problem
from parallelrun.data.arrays import NDArray, np
from parallelrun.data.document_files import DocumentFile, TextRow
from parallelrun.data.megatron import element_type, write_indexed
from parallelrun.data.tokenizing.tokenizer import Tokenizer

BATCH_BYTES, BATCH_ROWS = 2**20, 1024  # of documents that are encoded together
# Called with the bytes of the files read so far, those of all files, and the tokens so far.
Progress = Callable[[int, int, int], None]


@dataclass(frozen=True)
class Written:
    """Sizes of a written file. element: the integer type of its token ids."""

    documents: int
    tokens: int
    text_bytes: int
    element: str


def write_tokens(
    prefix: Path,
    files: Sequence[DocumentFile],
    tokenizer: Tokenizer,
    vocab: int,
    note: Mapping[str, Any],
    progress: Progress,
    max_bytes: int | None = None,
) -> Written:
    """Write the documents of the files as tokens; the three files appear whole or not at all.

    Empty documents are left out. note: fields of PREFIX.json beside the counts and the tokenizer's. max_bytes: no
    document that begins after so many bytes of text is read. Raises ConfigError if there is no token to write,
    DataError for a broken file, OSError.
    """
    encoder = _Encoder(files, tokenizer, progress, max_bytes)
    sequences = encoder.sequences()
    first = next(sequences, None)
    if first is None:
        cause = f"{len(files)} files without a token" if files else "no file"
        raise ConfigError(Problem(f"{cause}, so there is nothing to write", "INPUT"))
    prefix.parent.mkdir(parents=True, exist_ok=True)
    grouped = itertools.groupby(itertools.chain([first], sequences), key=lambda pair: pair[0])
    documents = ((tokens for _, tokens in group) for _, group in grouped)
    kind = element_type(vocab)

    used = {"tokenizer_sha256": tokenizer.identity.sha256, "tokenizer_path": tokenizer.identity.path}
    fields = {**note, **used, "vocab": vocab, "element": kind.name}
    counts = write_indexed(prefix, documents, kind, lambda: {**fields, "text_bytes": encoder.text_bytes})
    return Written(*counts, encoder.text_bytes, kind.name)


@dataclass
class _Encoder:
    files: Sequence[DocumentFile]
    tokenizer: Tokenizer
    progress: Progress
    max_bytes: int | None
    text_bytes: int = 0
    num_tokens: int = 0

    def sequences(self) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """(number of the document, tokens of a part of it): the documents that have a token, in order."""
        number, end, has_tokens = 0, self.tokenizer.end_of_document, False
        total = sum(file.size for file in self.files)
        for before, file, rows in self._batches():
            for row, tokens in zip(rows, self._encoded(file, rows)):
                if row.ends and end is not None and (has_tokens or tokens.size):
                    tokens = np.append(tokens, end)
                if tokens.size:
                    self.num_tokens += tokens.size
                    has_tokens = True
                    yield number, tokens
                if row.ends:
                    number, has_tokens = number + has_tokens, False
            self.progress(before + file.position, total, self.num_tokens)

    def _batches(self) -> Iterator[tuple[int, DocumentFile, list[TextRow]]]:
        """(bytes of the files before, file, rows of it that are encoded together)."""
        before = 0
        for file in self.files:
            rows: list[TextRow] = []
            num_bytes = 0
            for row in file.rows():
                if self.max_bytes is not None and self.text_bytes >= self.max_bytes:
                    break
                rows.append(row)
                num_bytes, self.text_bytes = num_bytes + len(row.text), self.text_bytes + len(row.text)
                if num_bytes >= BATCH_BYTES or len(rows) == BATCH_ROWS:
                    yield before, file, rows
                    rows, num_bytes = [], 0
            yield before, file, rows
            before += file.size

    def _encoded(self, file: DocumentFile, rows: Sequence[TextRow]) -> list[NDArray[np.int64]]:
        try:
            return self.tokenizer.encode([row.text for row in rows])
        except UnicodeDecodeError:
            for row in rows:
                try:
                    row.text.decode()
                except UnicodeDecodeError as error:
                    raise file.broken(row.number, f"no UTF-8 text: {error}") from error
            raise
