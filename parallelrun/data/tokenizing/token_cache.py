"""Tokens of text that is not read as plain bytes: written once, then mapped by every rank and every later run."""

from __future__ import annotations

import fcntl
import hashlib
import json
import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from parallelrun.base.errors import EnvironmentProblem, Problem
from parallelrun.config.schema.model_schema import DatasetConfig
from parallelrun.config.schema.run_schema import Config
from parallelrun.data.document_files import DocumentFile
from parallelrun.data.megatron import beside
from parallelrun.data.progress import ReadingProgress
from parallelrun.data.tokenizing.token_writer import write_tokens
from parallelrun.data.tokenizing.tokenizer import load_tokenizer
from parallelrun.planner.model.definitions import BYTES

VERSION = 1  # of what the same text and tokenizer give


# Writes token files: their prefix, the documents, and the settings.
Writer = Callable[[Path, list[DocumentFile], DatasetConfig], None]


def token_files(files: Sequence[DocumentFile], identity: str, config: Config, *more: str) -> Path:
    """The prefix of the token files of these documents, whether they are there or not. Raises OSError.

    identity: of the tokenizer; more: of what else decides. A change of a file, of one of these or of a key that matters
    gives other token files.
    """
    settings = config.dataset
    facts = [VERSION, identity, settings.column, settings.append_eod, settings.max_bytes, *more]
    status = [(str(file.path), stat.st_size, stat.st_mtime_ns) for file in files for stat in [file.path.stat()]]
    return cache_folder(config) / hashlib.sha256(json.dumps([facts, status]).encode()).hexdigest()[:32]


def cached_tokens(
    files: Sequence[DocumentFile], identity: str, config: Config, *more: str, write: Writer | None = None
) -> Path:
    """`token_files`, which are written first unless they are there; of several processes one writes, the others wait.

    write: instead of the writer of text. Raises EnvironmentProblem, DataError, ConfigError.
    """
    folder = cache_folder(config)
    try:
        prefix = token_files(files, identity, config, *more)
        if beside(prefix, ".idx").exists():
            return prefix
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with beside(prefix, ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not beside(prefix, ".idx").exists():
                # In a process of its own: the libraries start threads, and this one may fork the ranks.
                with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as child:
                    child.submit(write or _write, prefix, list(files), config.dataset).result()
        return prefix
    except OSError as error:
        message = f"cannot write tokens to {folder}: {error.strerror or error}: {error.filename or ''}"
        raise EnvironmentProblem(Problem(message, "dataset.cache", command="dataset.cache=FOLDER")) from error


def cache_folder(config: Config) -> Path:
    """The folder of the cached token files."""
    if config.dataset.cache:
        return Path(config.dataset.cache).expanduser().absolute()
    base = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    if base.startswith("~"):
        message = (
            f"no folder for the cached tokens: the user of uid {os.getuid()} has no home directory, and HOME is not set"
        )
        raise EnvironmentProblem(Problem(message, "dataset.cache", command="dataset.cache=FOLDER"))
    return Path(base, "parallelrun", "tokens").absolute()


def _write(prefix: Path, files: list[DocumentFile], settings: DatasetConfig) -> None:
    tokenizer = load_tokenizer(settings.tokenizer or BYTES, settings.append_eod)
    progress = ReadingProgress("tokenizing")
    note = {"prefix": str(prefix), "tokenizer": settings.tokenizer, "append_eod": settings.append_eod}
    write_tokens(prefix, files, tokenizer, tokenizer.vocab, note, progress, settings.max_bytes)
    progress.close()
