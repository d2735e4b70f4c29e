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
    """A token per byte, or, with `inner`, a tokenizer of the `tokenizers` package (any tokenizer.json)."""

    vocab: int
    end_of_document: int | None
    inner: Any = None

    def encode(self, text: bytes) -> NDArray[np.int64]:
        if self.inner is None:
            return np.frombuffer(text, dtype=np.uint8).astype(np.int64)
        ids = self.inner.encode(text.decode("utf-8", errors="replace"), add_special_tokens=False).ids
        return np.array(ids, dtype=np.int64)


def main(argv: Sequence[str]) -> int:
    """Run the tool; returns the exit code. Raises ConfigError, EnvironmentProblem."""
    arguments = _parser().parse_args(argv)
    report = tokenize(
        [Path(name).expanduser() for name in arguments.inputs],
        Path(os.path.abspath(Path(arguments.output).expanduser())),
        arguments.tokenizer,
        arguments.append_eod,
        arguments.vocab,
        arguments.json_key,
    )
    print("{documents} documents, {tokens} tokens of vocab {vocab} ({element})".format(**report))
    print("wrote {prefix}.bin and .idx; train on them: parallelrun dataset=megatron path={prefix}".format(**report))
    return EXIT_OK


def tokenize(
    inputs: Sequence[Path],
    prefix: Path,
    tokenizer: str = "bytes",
    append_eod: bool = False,
    vocab: int | None = None,
    json_key: str = "text",
) -> dict[str, Any]:
    """Write PREFIX.bin, PREFIX.idx and a note PREFIX.json; returns the note.

    Every file is one document, but of a .jsonl file every line is one (its `json_key`). vocab: number of token ids, if
    it should be more than the tokenizer's. Raises ConfigError, EnvironmentProblem.
    """
    codec = _load(tokenizer, append_eod)
    size = codec.vocab if vocab is None else vocab
    if size < codec.vocab:
        raise ConfigError(Problem(f"--vocab {size} is below the tokenizer's {codec.vocab} token ids", where="--vocab"))
    try:
        paths = [path for root in inputs for path in list_files(root)]
        _check_text(inputs, paths, codec, json_key)
        prefix.parent.mkdir(parents=True, exist_ok=True)
        kind = element_type(size)
        documents, tokens = write_indexed(prefix, _documents(paths, codec, append_eod, json_key), kind)
    except OSError as error:
        raise EnvironmentProblem(Problem(f"{error.filename or prefix}: {error.strerror}")) from error
    note = {
        "schema": 1,
        "prefix": str(prefix),
        "tokenizer": tokenizer,
        "append_eod": append_eod,
        "vocab": size,
        "element": kind.name,
        "documents": documents,
        "tokens": tokens,
        "sha256": {path.name: sha256_of(path) for path in (beside(prefix, ".bin"), beside(prefix, ".idx"))},
    }
    beside(prefix, ".json").write_text(json.dumps(note, indent=2) + "\n")
    return note


def _check_text(inputs: Sequence[Path], paths: Sequence[Path], codec: Tokenizer, json_key: str) -> None:
    """Raise ConfigError if there is nothing to write, before any file is created."""
    if next(_documents(paths, codec, False, json_key), None) is None:
        found = f"{len(paths)} files without a token" if paths else "no file"
        raise ConfigError(Problem(f"{', '.join(map(str, inputs))}: {found}, so there is nothing to write", "INPUT"))


def _documents(
    paths: Sequence[Path], codec: Tokenizer, append_eod: bool, json_key: str
) -> Iterator[list[NDArray[np.int64]]]:
    for path in paths:
        for text in _texts(path, json_key):
            tokens = codec.encode(text)
            if append_eod and tokens.size and codec.end_of_document is not None:
                tokens = np.append(tokens, codec.end_of_document)
            if tokens.size:
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
    return Tokenizer(inner.get_vocab_size(), ends[0] if ends else None, inner)


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
