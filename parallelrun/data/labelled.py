"""`dataset=labelled path=FILE.jsonl [tokenizer=tokenizer.json]`: texts with classes, rows of `text` and `label`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from parallelrun.base.errors import ConfigError, EnvironmentProblem, Problem
from parallelrun.config.schema.run_schema import Config
from parallelrun.data import files
from parallelrun.data.arrays import NDArray, np
from parallelrun.data.document_files import DocumentFile, find_documents
from parallelrun.data.text import TextFiles
from parallelrun.data.tokenizing.tokenizer import load_tokenizer
from parallelrun.data.tokens import held_out, require_samples
from parallelrun.planner.model.definitions import BYTES, Dataset, Split
from parallelrun.planner.model.model_spec import ModelSpec
from parallelrun.planner.model.model_spec.text import LABELLED

FIELD = "label"  # the field with the class: a text or a whole number


@dataclass(frozen=True)
class LabelledSplit(Split):
    """Texts of `seq` tokens at most, padded behind, and their classes."""

    texts: Sequence[NDArray[np.int64]]
    classes: NDArray[np.int64]
    seq: int
    pad_token: int

    def __len__(self) -> int:
        return len(self.texts)

    def sample(self, index: int) -> tuple[NDArray[Any], NDArray[Any]]:
        self.check(index)
        text = self.texts[index]
        tokens = np.full(self.seq, self.pad_token, np.int64)
        tokens[: len(text)] = text
        return tokens, self.classes[index]


class LabelledTexts(TextFiles):
    """A jsonl file, or those of a folder: objects with a text (`dataset.column`) and a `label`.

    Classes are numbered in the order of their labels. A text gets the tokenizer's special tokens; what is beyond
    model.seq is cut off, and `notes` says of how many texts.
    """

    kinds = (LABELLED,)
    packs = False
    unread = ("append_eod", "cache", "chat_template", "max_bytes")

    def vocab_size(self, config: Config) -> int:
        return len(_classes(_rows(config)))

    def is_ready(self, config: Config) -> bool:
        return True

    def open(self, config: Config, spec: ModelSpec) -> Dataset:
        assert spec.text is not None, "check_samples has accepted the model"
        rows = _rows(config)
        encoded, _ = _encoded(rows, config, spec.seq)
        most = max(int(text.max(initial=0)) for text in encoded)
        if most >= spec.text.num_ids:
            message = f"token id {most} of {config.dataset.path} is not below the model's {spec.text.num_ids}"
            raise ConfigError(Problem(message, "dataset.tokenizer", f"model.hf.vocab_size={most + 1}"))
        numbers = {label: number for number, label in enumerate(_classes(rows))}
        classes = np.array([numbers[label] for _, label in rows], np.int64)
        keys = np.array([files.hash_name(text) for text, _ in rows], np.uint64)
        is_val = held_out(keys, config.dataset.val_fraction)
        train, val = (_split(encoded, classes, chosen, spec) for chosen in (~is_val, is_val))
        content = [text.tobytes() for text in encoded] + [classes.tobytes(), str(config.dataset.val_fraction).encode()]
        digest = hashlib.sha256(b"labelled/1/" + b"".join(hashlib.sha256(part).digest() for part in content))
        dataset = Dataset("labelled", len(numbers), digest.hexdigest(), train, val)
        return require_samples(dataset, config, spec, f"{config.dataset.path} ({len(rows)} texts)")

    def notes(self, config: Config, spec: ModelSpec, dataset: Dataset) -> list[str]:
        rows = _rows(config)
        num_cut = _encoded(rows, config, spec.seq)[1]
        said = f"{num_cut:,} of {len(rows):,} texts of dataset=labelled are cut off after model.seq={spec.seq} tokens"
        return [said] if num_cut else []


def _split(
    texts: Sequence[NDArray[np.int64]], classes: NDArray[np.int64], chosen: NDArray[np.bool_], spec: ModelSpec
) -> LabelledSplit:
    assert spec.text is not None
    own = [text for text, is_own in zip(texts, chosen) if is_own]
    return LabelledSplit(own, classes[chosen], spec.seq, spec.text.pad_token)


def _encoded(rows: Sequence[tuple[str, Any]], config: Config, seq: int) -> tuple[list[NDArray[np.int64]], int]:
    """The tokens of each text, and the number of texts that are cut off."""
    tokenizer = load_tokenizer(config.dataset.tokenizer or BYTES, append_eod=False)
    texts = [text for text, _ in rows]
    if tokenizer.inner is None:
        encoded = [tokens.astype(np.int64) for tokens in tokenizer.encode([text.encode() for text in texts])]
        return [tokens[:seq] for tokens in encoded], sum(len(tokens) > seq for tokens in encoded)
    tokenizer.inner.enable_truncation(seq)  # which keeps the special tokens behind a text
    encodings = tokenizer.inner.encode_batch(texts, add_special_tokens=True)
    arrays = [np.array(encoding.ids[:seq], np.int64) for encoding in encodings]
    return arrays, sum(bool(encoding.overflowing) for encoding in encodings)


def _classes(rows: Sequence[tuple[str, Any]]) -> list[Any]:
    return sorted({label for _, label in rows}, key=lambda label: (isinstance(label, str), label))


def _rows(config: Config) -> tuple[tuple[str, Any], ...]:
    """(text, label) of every row. Raises EnvironmentProblem, ConfigError, DataError naming the file and the line."""
    root = files.resolve_path(config, "a .jsonl file of texts and labels")
    try:
        documents, _ = find_documents(root, config.dataset.column, config.dataset.split)
        versions = tuple((file.path, file.size, file.path.stat().st_mtime_ns) for file in documents)
    except OSError as error:
        raise files.path_problem(f"cannot read {error.filename or root}: {error.strerror}") from error
    if not any(size for _, size, _ in versions):
        raise files.path_problem(f"{root} holds no text")
    return _read(versions, config.dataset.column)


@lru_cache(maxsize=4)
def _read(versions: tuple[tuple[Path, int, int], ...], column: str) -> tuple[tuple[str, Any], ...]:
    """versions: the files with their sizes and times of change, so that files that have changed are read again."""
    return tuple(row for path, size, _ in versions for row in _rows_of(DocumentFile(path, column, size)))


def _rows_of(file: DocumentFile) -> Iterator[tuple[str, Any]]:
    if not file.is_jsonl:
        raise EnvironmentProblem(Problem(f"{file.path} is no .jsonl file", "dataset.path"))
    for number, row in file.objects():
        if not isinstance(row, dict) or not isinstance(row.get(file.column), str):
            raise file.broken(number, f"no JSON object with a text in {file.column!r}")
        if not isinstance(row.get(FIELD), (str, int)):
            raise file.broken(number, f"no text and no whole number in {FIELD!r}")
        yield row[file.column], row[FIELD]


DATASET = LabelledTexts()
