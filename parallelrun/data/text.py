"""`dataset=text path=FILE_OR_FOLDER [tokenizer=tokenizer.json]`: text, jsonl, parquet and arrow files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from parallelrun.base.errors import EnvironmentProblem
from parallelrun.config.schema.run_schema import Config
from parallelrun.data import files
from parallelrun.data.document_files import DocumentFile, find_documents
from parallelrun.data.megatron import beside, open_tokens
from parallelrun.data.tokenizing.token_cache import cached_tokens, token_files
from parallelrun.data.tokenizing.tokenizer import NUM_BYTES, TokenizerFile, find_tokenizer
from parallelrun.planner.model.definitions import BYTES, Dataset, DatasetDefinition, TextTokens
from parallelrun.planner.model.model_spec import ModelSpec


class TextFiles(DatasetDefinition):
    """The bytes of a file, or of every file under a folder (hidden ones left out) in order of their names.

    With a tokenizer, or where the documents are rows of a table (jsonl, parquet, arrow), their tokens are written to
    `dataset.cache` first. `dataset.max_bytes` limits the total.
    """

    kinds = ("tokens",)
    reads_path = reads_tokenizer = packs = True

    def vocab_size(self, config: Config) -> int:
        file = tokenizer_file(config)
        return file.vocab if file else NUM_BYTES + config.dataset.append_eod

    def tokenizer(self, config: Config) -> TextTokens:
        file = tokenizer_file(config)
        return file.identity if file else TextTokens(BYTES)

    def is_ready(self, config: Config) -> bool:
        try:
            root = files.resolve_path(config, "a file or a folder of text")
            documents, _ = find_documents(root, config.dataset.column, config.dataset.split)
            prefix = token_files(documents, self.tokenizer(config).sha256, config)
        except (OSError, EnvironmentProblem):
            return True  # `open` says what is wrong
        return not _is_tokenized(config, documents) or beside(prefix, ".idx").exists()

    def open(self, config: Config, spec: ModelSpec) -> Dataset:
        root = files.resolve_path(config, "a file or a folder of text")
        try:
            documents, _ = find_documents(root, config.dataset.column, config.dataset.split)
            size = sum(file.size for file in documents)
        except OSError as error:
            raise files.path_problem(f"cannot read {error.filename or root}: {error.strerror}") from error
        source = f"{root} ({len(documents)} files, {size} bytes)"
        if not size:
            raise files.path_problem(f"{source} holds no text")
        if _is_tokenized(config, documents):
            prefix = cached_tokens(documents, self.tokenizer(config).sha256, config)
            return open_tokens(prefix, source, config, spec)
        read = _read(documents, root, config.dataset.max_bytes)
        return files.open_files(read, files.fingerprint(read), config, spec, source)


def tokenizer_file(config: Config) -> TokenizerFile | None:
    """The tokenizer.json that the configuration names; None for bytes. Raises ConfigError."""
    source = config.dataset.tokenizer
    return None if source in (None, BYTES) else find_tokenizer(source, "dataset.tokenizer")


def _is_tokenized(config: Config, documents: Sequence[DocumentFile]) -> bool:
    """Whether tokens are written; otherwise the files' own bytes are the tokens."""
    return bool(tokenizer_file(config)) or config.dataset.append_eod or any(file.is_table for file in documents)


def _read(documents: list[DocumentFile], root: Path, max_bytes: int | None) -> list[files.ByteFile]:
    read: list[files.ByteFile] = []
    left = max_bytes
    try:
        for path in (file.path for file in documents):
            if left is not None and left <= 0:
                break
            name = path.relative_to(root).as_posix() if path != root else path.name
            read.append(files.read_file(path, name, left))
            left = None if left is None else left - read[-1].content.size
    except OSError as error:
        raise files.path_problem(f"cannot read {error.filename or root}: {error.strerror}") from error
    return read


DATASET = TextFiles()
