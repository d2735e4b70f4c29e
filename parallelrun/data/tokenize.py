"""`parallelrun tokenize`: text files to Megatron's .bin/.idx, for `dataset=megatron`."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parallelrun.data.files import list_files
from parallelrun.data.megatron import beside, element_type, write_indexed
from parallelrun.errors import EXIT_OK, ConfigError, EnvironmentProblem, Problem
from parallelrun.records import sha256_of

END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>")


@dataclass(frozen=True)
class Tokenizer:
    """A token per byte, or, with `inner`, a tokenizer of the `tokenizers` package (any tokenizer.json).

    end_of_document: the token that is appended to every document, or None.
    """

    vocab: int
    end_of_document: int | None
    inner: Any = None

    def encode(self, text: bytes) -> NDArray[np.int64]:
        """The tokens of a document; none for an empty one."""
        if self.inner is None:
            tokens = np.frombuffer(text, dtype=np.uint8).astype(np.int64)
        else:
            ids = self.inner.encode(text.decode("utf-8", errors="replace"), add_special_tokens=False).ids
            tokens = np.array(ids, dtype=np.int64)
        return np.append(tokens, self.end_of_document) if tokens.size and self.end_of_document is not None else tokens


def main(argv: Sequence[str]) -> int:
    """Write PREFIX.bin, PREFIX.idx and a note PREFIX.json; returns the exit code.

    Every file is one document, but of a .jsonl file every line is one. Raises ConfigError, EnvironmentProblem.
    """
    arguments = _parser().parse_args(argv)
    codec = _load(arguments.tokenizer, arguments.append_eod)
    vocab = codec.vocab if arguments.vocab is None else arguments.vocab
    if vocab < codec.vocab:
        raise ConfigError(Problem(f"--vocab {vocab} is below the tokenizer's {codec.vocab} token ids", where="--vocab"))
    prefix = Path(os.path.abspath(Path(arguments.output).expanduser()))
    kind = element_type(vocab)
    try:
        paths = [path for root in arguments.inputs for path in list_files(Path(root).expanduser())]
        if next(_documents(paths, codec, arguments.json_key), None) is None:  # before any file is created
            found = f"{len(paths)} files without a token" if paths else "no file"
            what = f"{', '.join(arguments.inputs)}: {found}, so there is nothing to write"
            raise ConfigError(Problem(what, "INPUT"))
        prefix.parent.mkdir(parents=True, exist_ok=True)
        num_documents, num_tokens = write_indexed(prefix, _documents(paths, codec, arguments.json_key), kind)
    except OSError as error:
        raise EnvironmentProblem(Problem(f"{error.filename or prefix}: {error.strerror}")) from error
    note = {
        "schema": 1,
        "prefix": str(prefix),
        "tokenizer": arguments.tokenizer,
        "append_eod": arguments.append_eod,
        "vocab": vocab,
        "element": kind.name,
        "documents": num_documents,
        "tokens": num_tokens,
        "sha256": {path.name: sha256_of(path) for path in (beside(prefix, ".bin"), beside(prefix, ".idx"))},
    }
    beside(prefix, ".json").write_text(json.dumps(note, indent=2) + "\n")
    print(f"{num_documents} documents, {num_tokens} tokens of vocab {vocab} ({kind.name})")
    print(f"wrote {prefix}.bin and .idx; train on them: parallelrun dataset=megatron path={prefix}")
    return EXIT_OK


def _documents(paths: Sequence[Path], codec: Tokenizer, json_key: str) -> Iterator[list[NDArray[np.int64]]]:
    for path in paths:
        for text in _texts(path, json_key):
            if (tokens := codec.encode(text)).size:
                yield [tokens]


def _texts(path: Path, json_key: str) -> Iterator[bytes]:
    if path.suffix != ".jsonl":
        yield path.read_bytes()
        return
    with path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)[json_key]
            except (ValueError, KeyError, TypeError) as error:
                what = f"{path}:{number} is no JSON object with a {json_key!r}"
                raise EnvironmentProblem(Problem(what, "--json-key")) from error
            yield str(text).encode()


def _load(name: str, append_eod: bool) -> Tokenizer:
    if name == "bytes":
        return Tokenizer(257, 256) if append_eod else Tokenizer(256, None)
    kind, _, source = name.partition(":")
    if kind != "hf" or not source:
        raise ConfigError(Problem(f"unknown tokenizer {name!r}", "--tokenizer", "bytes or hf:NAME"))
    try:
        from tokenizers import Tokenizer as Loader
    except ImportError as error:
        what = "hf: tokenizers need the package `tokenizers`"
        raise EnvironmentProblem(Problem(what, command="pip install tokenizers")) from error
    path = Path(source).expanduser()
    path = path / "tokenizer.json" if path.is_dir() else path
    try:
        inner = Loader.from_file(str(path)) if path.exists() else Loader.from_pretrained(source)
    except Exception as error:  # the package raises bare Exception
        raise EnvironmentProblem(Problem(f"cannot load tokenizer {source}: {error}", where="--tokenizer")) from error
    ends = [inner.token_to_id(text) for text in END_OF_TEXT if inner.token_to_id(text) is not None]
    if append_eod and not ends:
        raise ConfigError(Problem(f"tokenizer {source} has none of {', '.join(END_OF_TEXT)}", where="--append-eod"))
    return Tokenizer(inner.get_vocab_size(), ends[0] if append_eod else None, inner)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="parallelrun tokenize", description="Write text as Megatron's .bin/.idx token files."
    )
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="file, folder, or .jsonl (a document per line)")
    parser.add_argument("--output", required=True, metavar="PREFIX", help="writes PREFIX.bin, PREFIX.idx, PREFIX.json")
    parser.add_argument("--tokenizer", default="bytes", metavar="NAME", help="bytes (default), or hf:NAME_OR_PATH")
    parser.add_argument("--append-eod", action="store_true", help="end every document with the end-of-document token")
    parser.add_argument("--vocab", type=int, metavar="N", help="number of token ids, when more than the tokenizer's")
    parser.add_argument("--json-key", default="text", metavar="KEY", help="field of .jsonl lines (default: text)")
    return parser
