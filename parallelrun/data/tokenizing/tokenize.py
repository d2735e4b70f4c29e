"""`parallelrun tokenize`: text, jsonl, parquet and arrow files to Megatron's .bin/.idx, for `dataset=megatron`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from parallelrun.base.errors import EXIT_OK, ConfigError, EnvironmentProblem, Problem
from parallelrun.base.wording import counted
from parallelrun.data.document_files import DEFAULT_SPLIT, DocumentFile, find_documents
from parallelrun.data.progress import ReadingProgress
from parallelrun.data.tokenizing.token_writer import write_tokens
from parallelrun.data.tokenizing.tokenizer import load_tokenizer

VALUED = ("output", "tokenizer", "vocab", "column", "split")  # flags that may be given as `name=value`


def main(argv: Sequence[str]) -> int:
    """Write PREFIX.bin, PREFIX.idx and a note PREFIX.json; returns the exit code.

    A text file is one document; of a .jsonl, .parquet or .arrow file every row is one. Raises ConfigError,
    EnvironmentProblem, DataError.
    """
    arguments = _read(argv)
    tokenizer = load_tokenizer(arguments.tokenizer, arguments.append_eod, "--tokenizer")
    vocab = tokenizer.vocab if arguments.vocab is None else arguments.vocab
    if vocab < tokenizer.vocab:
        message = f"--vocab {vocab} is below the tokenizer's {tokenizer.vocab} token ids"
        raise ConfigError(Problem(message, where="--vocab"))
    prefix = Path(os.path.abspath(Path(arguments.output).expanduser()))
    progress = ReadingProgress("tokenizing")
    try:
        files: list[DocumentFile] = []
        for root in arguments.inputs:
            documents, left_out = find_documents(Path(root).expanduser().absolute(), arguments.column, arguments.split)
            files += documents
            if left_out:
                others = ", ".join(f"{name} ({counted(count, 'file')})" for name, count in left_out.items())
                print(f"{root}: split {arguments.split or DEFAULT_SPLIT}; left out: {others}")
        note = {"prefix": str(prefix), "tokenizer": arguments.tokenizer, "append_eod": arguments.append_eod}
        written = write_tokens(prefix, files, tokenizer, vocab, note, progress)
    except OSError as error:
        raise EnvironmentProblem(Problem(f"{error.filename or prefix}: {error.strerror or error}")) from error
    progress.close()
    size = f"{written.documents} documents, {written.tokens} tokens of vocab {vocab} ({written.element})"
    print(f"{size}, {written.text_bytes / written.tokens:.2f} bytes per token")
    print(f"wrote {prefix}.bin and .idx; train on them:\nparallelrun dataset=megatron path={prefix}")
    return EXIT_OK


def _read(argv: Sequence[str]) -> argparse.Namespace:
    pairs = [(word, *word.partition("=")) for word in argv]
    return _parser().parse_args([f"--{word}" if equals and key in VALUED else word for word, key, equals, _ in pairs])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="parallelrun tokenize", description="Write text as Megatron's .bin/.idx token files."
    )
    inputs = "file or folder: text, .jsonl(.gz), .parquet, .arrow, or what datasets' save_to_disk wrote"
    tokenizer = "bytes (default), a tokenizer.json or a directory with one, or hf:NAME of Hugging Face's hub"
    column = "field or column with the text of .jsonl, .parquet and .arrow (default: text)"
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help=inputs)
    parser.add_argument("--output", required=True, metavar="PREFIX", help="writes PREFIX.bin, PREFIX.idx, PREFIX.json")
    parser.add_argument("--tokenizer", default="bytes", metavar="FILE", help=tokenizer)
    parser.add_argument("--append-eod", action="store_true", help="end every document with the end-of-document token")
    parser.add_argument("--vocab", type=int, metavar="N", help="number of token ids, when more than the tokenizer's")
    parser.add_argument("--column", "--json-key", default="text", metavar="NAME", help=column)
    parser.add_argument("--split", metavar="NAME", help="of a folder with splits (default: train, if there is one)")
    return parser
