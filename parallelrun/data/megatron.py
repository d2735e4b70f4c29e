"""`dataset=megatron path=PREFIX`: Megatron's token files PREFIX.bin and PREFIX.idx, read and written byte for byte.

PREFIX.bin holds all token ids back to back. PREFIX.idx, little endian: magic (9 bytes), uint64 version, uint8 element
type, uint64 number of sequences N, uint64 number of document boundaries M, int32[N] lengths in tokens, int64[N] byte
offsets, int64[M] sequence numbers at which documents start (first 0, last N). `parallelrun tokenize` writes both, and
PREFIX.json beside them: vocab, tokenizer and counts.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallelrun.base.errors import EnvironmentProblem, Problem
from parallelrun.base.records import sha256_of
from parallelrun.config.schema.run_schema import Config
from parallelrun.data import files
from parallelrun.data.arrays import NDArray, np
from parallelrun.data.tokens import Documents
from parallelrun.planner.model.definitions import Dataset, DatasetDefinition, TextTokens
from parallelrun.planner.model.model_spec import ModelSpec

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
ELEMENT_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
SMALL_VOCAB = 65500
# Called at the end, gives the fields of PREFIX.json beside the numbers of documents and tokens, and the files' sha256.
Note = Callable[[], Mapping[str, Any]]
# Files up to this size are scanned for their largest token id; for larger ones the user gives the vocab.
SCAN_BYTES = 256 * 2**20


class MegatronTokens(DatasetDefinition):
    """Windows that cross documents; a document belongs to train or val by the hash of its number.

    A token id outside the model's vocab raises EnvironmentProblem when its sample is read.
    """

    kinds = ("tokens",)
    reads_path = packs = True

    def vocab_size(self, config: Config) -> int:
        """`dataset.vocab`, else the vocab in PREFIX.json, else the files' largest token id + 1.

        Raises EnvironmentProblem when the files cannot be read, or are too large to be scanned.
        """
        if config.dataset.vocab is not None:
            return config.dataset.vocab
        prefix = _prefix(config)
        noted = _noted(prefix, "vocab")
        if isinstance(noted, int) and noted > 0:
            return noted
        indexed = open_indexed(prefix)
        size = indexed.tokens.nbytes
        if size > SCAN_BYTES:
            message = f"{beside(prefix, '.bin')} ({size} bytes) is too large to look for its largest token id"
            fix = "dataset.vocab=<number of token ids of its tokenizer>"
            raise EnvironmentProblem(Problem(message, "dataset.vocab", fix))
        return int(indexed.tokens.max()) + 1 if indexed.tokens.size else 1

    def tokenizer(self, config: Config) -> TextTokens | None:
        """Return the tokenizer that the note of `parallelrun tokenize` names; None without a note."""
        if not config.dataset.path:
            return None
        sha256, path = (_noted(_prefix(config), f"tokenizer_{name}") for name in ("sha256", "path"))
        return TextTokens(str(sha256), Path(str(path)) if path else None) if sha256 else None

    def open(self, config: Config, spec: ModelSpec) -> Dataset:
        prefix = _prefix(config)
        return open_tokens(prefix, str(prefix), config, spec)


def open_tokens(prefix: Path, name: str, config: Config, spec: ModelSpec) -> Dataset:
    """The dataset of a pair of files. name: for messages. Raises EnvironmentProblem."""
    documents, digest = read_documents(prefix)
    source = f"{name} ({documents.starts.size} documents, {documents.num_tokens} tokens)"
    return documents.open(spec.vocab, digest, config, spec, source)


def read_documents(prefix: Path) -> tuple[Documents, str]:
    """(the documents of a pair of files, their digest). Raises EnvironmentProblem."""
    indexed = open_indexed(prefix)
    starts, lengths = indexed.starts, indexed.lengths
    keys = np.arange(starts.size, dtype=np.uint64)
    source_of = np.zeros(starts.size, dtype=np.int64)
    documents = Documents([indexed.tokens], (str(beside(prefix, ".bin")),), source_of, starts, lengths, keys)
    return documents, hashlib.sha256(
        beside(prefix, ".idx").read_bytes() + files.digest_array(indexed.tokens)
    ).hexdigest()


def _noted(prefix: Path, key: str) -> Any:
    """A field of PREFIX.json; None if there is no note, or none of ours."""
    try:
        return json.loads(beside(prefix, ".json").read_text())[key]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _prefix(config: Config) -> Path:
    path = files.resolve_path(config, "the prefix of PREFIX.bin and PREFIX.idx")
    return path.with_suffix("") if path.suffix in (".bin", ".idx") else path


def beside(prefix: Path, suffix: str) -> Path:
    """The path of PREFIX.bin, PREFIX.idx or PREFIX.json."""
    return prefix.with_name(prefix.name + suffix)


def element_type(vocab: int) -> np.dtype[Any]:
    """uint16 where Megatron's convention allows it, else int32."""
    return np.dtype("<u2" if vocab < SMALL_VOCAB else "<i4")


@dataclass(frozen=True)
class IndexedTokens:
    """An opened pair of files. tokens: memory map of all; starts, lengths: of every document, in tokens."""

    tokens: NDArray[Any]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]


def open_indexed(prefix: Path) -> IndexedTokens:
    """Map PREFIX.bin by PREFIX.idx. Raises EnvironmentProblem for anything that is not exactly the format."""
    bin_path, idx_path = beside(prefix, ".bin"), beside(prefix, ".idx")
    try:
        raw, bin_bytes = idx_path.read_bytes(), bin_path.stat().st_size
    except OSError as error:
        raise _problem(f"cannot read {error.filename}: {error.strerror}") from error
    if len(raw) < HEADER.size or not raw.startswith(MAGIC):
        raise _problem(f"{idx_path} is no Megatron index: it does not begin with {MAGIC!r}")
    _, version, code, num_sequences, num_boundaries = HEADER.unpack_from(raw)
    if version != VERSION:
        raise _problem(f"{idx_path} has version {version}; only version {VERSION} is known")
    kind = np.dtype(ELEMENT_TYPES.get(code, "<f8"))
    if kind.kind == "f":
        raise _problem(f"{idx_path} has element type {code}, which is no integer type for token ids")
    size = HEADER.size + 12 * num_sequences + 8 * num_boundaries
    if len(raw) not in (size, size + num_sequences):  # the modes of multimodal files, a byte each, are not read
        needed = f"{num_sequences} sequences and {num_boundaries} document boundaries need {size}"
        raise _problem(f"{idx_path} has {len(raw)} bytes; {needed}: it is truncated or damaged")
    lengths = np.frombuffer(raw, "<i4", num_sequences, HEADER.size).astype(np.int64)
    byte_offsets = np.frombuffer(raw, "<i8", num_sequences, HEADER.size + 4 * num_sequences)
    documents = np.frombuffer(raw, "<i8", num_boundaries, HEADER.size + 12 * num_sequences).astype(np.int64)
    if (lengths < 0).any() or not np.array_equal(byte_offsets, (np.cumsum(lengths) - lengths) * kind.itemsize):
        raise _problem(f"{idx_path} is damaged: its offsets are not the running sum of its sequence lengths")
    described = int(lengths.sum()) * kind.itemsize
    if bin_bytes < described:
        raise _problem(f"{bin_path} is truncated: {bin_bytes} bytes, its index describes {described}")
    if not documents.size or documents[0] != 0 or documents[-1] != lengths.size or (np.diff(documents) < 0).any():
        raise _problem(f"{idx_path} is damaged: document boundaries must rise from 0 to {lengths.size} sequences")
    count = bin_bytes // kind.itemsize
    tokens = np.memmap(bin_path, dtype=kind, mode="r", shape=(count,)) if count else np.empty(0, kind)
    bounds = np.append(0, np.cumsum(lengths))[documents]  # a document's sequences follow each other
    return IndexedTokens(tokens, bounds[:-1], np.diff(bounds))


def write_indexed(
    prefix: Path, documents: Iterable[Iterable[NDArray[Any]]], kind: np.dtype[Any], note: Note | None = None
) -> tuple[int, int]:
    """Write documents, each a run of sequences of token ids; returns (documents, tokens) written.

    The files are written under temporary names and renamed, the index last: an interrupted run leaves no complete
    pair, nor a new file beside an old one. Raises ValueError for a token id that `kind` cannot hold, OSError.
    """
    code = next(code for code, text in ELEMENT_TYPES.items() if np.dtype(text) == kind)
    bounds = np.iinfo(kind)
    lengths, boundaries = array("q"), array("q", [0])  # 8 bytes a document
    suffixes = (".bin", ".json", ".idx")
    bin_part, note_part, idx_part = parts = [beside(prefix, f"{suffix}.part") for suffix in suffixes]
    digest = hashlib.sha256()
    try:
        with bin_part.open("wb") as stream:
            for document in documents:
                for sequence in document:
                    if sequence.size and (sequence.min() < bounds.min or sequence.max() > bounds.max):
                        raise ValueError(f"token id {sequence.max()} does not fit {kind.name}")
                    content = sequence.astype(kind).tobytes()
                    stream.write(content)
                    digest.update(content)
                    lengths.append(sequence.size)
                boundaries.append(len(lengths))
        sizes = np.array(lengths, dtype="<i4")
        offsets = (np.cumsum(sizes, dtype="<i8") - sizes) * kind.itemsize
        with idx_part.open("wb") as stream:
            stream.write(HEADER.pack(MAGIC, VERSION, code, len(lengths), len(boundaries)))
            for numbers in (sizes, offsets.astype("<i8"), np.array(boundaries, dtype="<i8")):
                stream.write(numbers.tobytes())
        num_documents, num_tokens = len(boundaries) - 1, int(sizes.sum(dtype=np.int64))
        if note is not None:
            hashes = digest.hexdigest(), sha256_of(idx_part)
            digests = {beside(prefix, suffix).name: text for suffix, text in zip((".bin", ".idx"), hashes)}
            fields = {"schema": 1, **note(), "documents": num_documents, "tokens": num_tokens, "sha256": digests}
            note_part.write_bytes(json.dumps(fields, indent=2, default=str).encode() + b"\n")
        for part in filter(Path.exists, parts):  # before they get their names
            with part.open("rb") as stream:
                os.fsync(stream.fileno())
        for suffix in (".idx", ".json"):  # of an older pair, which the new tokens do not belong to
            beside(prefix, suffix).unlink(missing_ok=True)
        for suffix, part in zip(suffixes, parts):
            if part.exists():
                os.replace(part, beside(prefix, suffix))
    finally:
        for part in parts:
            part.unlink(missing_ok=True)
    return num_documents, num_tokens


def _problem(what: str) -> EnvironmentProblem:
    return files.path_problem(what, command="parallelrun tokenize FILE --output PREFIX")


DATASET = MegatronTokens()
