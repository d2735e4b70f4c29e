"""`dataset=megatron path=PREFIX`: the .bin/.idx token files that Megatron and `parallelrun tokenize` write."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np

from parallelrun.config.schema import Config
from parallelrun.data.byte_files import digest_array
from parallelrun.data.dataset import Dataset, Documents, split_documents
from parallelrun.data.indexed import data_path, index_path, open_indexed
from parallelrun.data.text import resolve_path
from parallelrun.errors import EnvironmentProblem, Problem
from parallelrun.model_spec import ModelSpec

# Files up to this size are read through for their largest token id; of larger ones the user says the vocab.
SCAN_BYTES = 256 * 2**20


def note_path(prefix: Path) -> Path:
    """PREFIX.json: what `parallelrun tokenize` notes beside the two files (vocab, tokenizer, counts)."""
    return prefix.with_name(prefix.name + ".json")


def vocab_size(config: Config) -> int:
    """`dataset.vocab`, else what tokenize noted, else the files' largest token id + 1.

    Raises EnvironmentProblem when the files cannot be read, or are too large to be read through.
    """
    if config.dataset.vocab is not None:
        return config.dataset.vocab
    prefix = _prefix(config)
    try:
        noted = json.loads(note_path(prefix).read_text())["vocab"]
        if isinstance(noted, int) and noted > 0:
            return noted
    except (OSError, ValueError, KeyError, TypeError):
        pass  # not written by us: the tokens themselves tell
    indexed = open_indexed(prefix)
    if indexed.tokens.nbytes > SCAN_BYTES:
        raise EnvironmentProblem(
            Problem(
                f"{data_path(prefix)} ({indexed.tokens.nbytes} bytes) is too large to look for its largest token id",
                where="dataset.vocab",
                suggestion="dataset.vocab=<number of token ids of its tokenizer>",
            )
        )
    return int(indexed.tokens.max()) + 1 if indexed.tokens.size else 1


def open(config: Config, spec: ModelSpec) -> Dataset:
    """Windows that cross documents; a document belongs to train or val by the hash of its number.

    Raises EnvironmentProblem for missing, damaged or too small files; a token id outside the model's vocab raises it
    when its sample is read.
    """
    prefix = _prefix(config)
    indexed = open_indexed(prefix)
    starts, lengths = indexed.document_ranges()
    documents = Documents(
        sources=[indexed.tokens],
        names=(str(data_path(prefix)),),
        source_of=np.zeros(starts.size, dtype=np.int64),
        starts=starts,
        lengths=lengths,
        keys=np.arange(starts.size, dtype=np.uint64),
    )
    digest = hashlib.sha256(index_path(prefix).read_bytes() + digest_array(indexed.tokens)).hexdigest()
    source = f"{prefix} ({starts.size} documents, {int(lengths.sum())} tokens)"
    return split_documents("megatron", documents, spec.vocab, digest, config, spec, source)


def _prefix(config: Config) -> Path:
    path = resolve_path(config, "the prefix of PREFIX.bin and PREFIX.idx")
    return path.with_suffix("") if path.suffix in (".bin", ".idx") else path
