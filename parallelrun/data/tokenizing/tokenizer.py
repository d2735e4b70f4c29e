"""Tokenizers: a token per byte, or a tokenizer.json, encoded by the package `tokenizers`.

What a plan needs (vocabulary and sha256) is read from the file itself, without that package.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from parallelrun.base.errors import ConfigError, EnvironmentProblem, Problem
from parallelrun.base.user_code import absence
from parallelrun.data.arrays import NDArray, np
from parallelrun.planner.model.definitions import BYTES, TextTokens

NUM_BYTES = 256  # token ids of text read as bytes
FILE = "tokenizer.json"
END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>")
INSTALL = "pip install 'parallelrun[data]'"


@dataclass(frozen=True)
class TokenizerFile:
    """A tokenizer.json that has not been loaded. vocab: its largest token id + 1. ids: of its special tokens."""

    path: Path
    sha256: str
    vocab: int
    ids: Mapping[str, int]

    @property
    def identity(self) -> TextTokens:
        return TextTokens(self.sha256, self.path)


@dataclass(frozen=True)
class Tokenizer:
    """A token per byte, or, with `inner`, a tokenizer of the package `tokenizers`.

    vocab: number of token ids. end_of_document: the token that ends every document, or None. identity: for records.
    """

    vocab: int
    end_of_document: int | None
    identity: TextTokens
    inner: Any = None

    def encode(self, texts: Sequence[bytes]) -> list[NDArray[np.int64]]:
        """The tokens of each text, without special ones; several texts on all cores. Raises UnicodeDecodeError."""
        if self.inner is None:
            return [np.frombuffer(text, dtype=np.uint8).astype(np.int64) for text in texts]
        decoded = [text.decode() for text in texts]
        return [np.array(encoding.ids, dtype=np.int64) for encoding in self._batch(decoded, add_special_tokens=False)]

    def encode_with_offsets(self, text: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(tokens, (tokens, 2): the characters [start, stop) of the text that each stands for)."""
        if self.inner is None:
            places = np.repeat(np.arange(len(text)), [len(character.encode()) for character in text])
            return self.encode([text.encode()])[0], np.stack([places, places + 1], axis=1)
        encoding = self.inner.encode(text, add_special_tokens=False)
        return np.array(encoding.ids, dtype=np.int64), np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids; bytes that are no text become a replacement character."""
        if self.inner is None:
            return bytes(token for token in tokens if token < NUM_BYTES).decode(errors="replace")
        return str(self.inner.decode(list(tokens), skip_special_tokens=False))

    @property
    def _batch(self) -> Callable[..., list[Any]]:
        fast: Callable[..., list[Any]] | None = getattr(self.inner, "encode_batch_fast", None)  # it keeps no offsets
        slow: Callable[..., list[Any]] = self.inner.encode_batch
        return fast or slow


def find_tokenizer(source: str, where: str) -> TokenizerFile:
    """The tokenizer.json at `source`, a file or a directory with one. where: the key or flag of the user's request.

    Raises ConfigError.
    """
    place = Path(source).expanduser().absolute()
    path = place / FILE if place.is_dir() else place
    try:
        status = path.stat()
        return _read(path, (status.st_size, status.st_mtime_ns))
    except FileNotFoundError:
        message = f"unknown tokenizer {source!r}: there is no file {path}"
        raise ConfigError(Problem(message, where, f"{BYTES}, or the path of a {FILE}")) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        message = f"{path} is no {FILE}: {type(error).__name__}: {error}"
        raise ConfigError(Problem(message, where)) from error


@lru_cache(maxsize=8)
def _read(path: Path, version: tuple[int, int]) -> TokenizerFile:
    """version: size and time of change, so that a file that has changed is read again."""
    raw = path.read_bytes()
    document = json.loads(raw)
    vocab = document["model"]["vocab"]
    ids = set(vocab.values() if isinstance(vocab, dict) else range(len(vocab)))  # a list: Unigram's pieces
    added = {str(entry["content"]): int(entry["id"]) for entry in document.get("added_tokens") or ()}
    special = added | ({text: vocab[text] for text in END_OF_TEXT if text in vocab} if isinstance(vocab, dict) else {})
    return TokenizerFile(path, hashlib.sha256(raw).hexdigest(), max(ids | set(added.values())) + 1, special)


def load_tokenizer(source: str, append_eod: bool, where: str = "dataset.tokenizer") -> Tokenizer:
    """The tokenizer `source`: `bytes`, a tokenizer.json or a directory with one, or `hf:NAME` of Hugging Face's hub.

    append_eod: documents end with its end-of-document token (256 for bytes). Raises ConfigError; EnvironmentProblem
    without the package `tokenizers`.
    """
    if source == BYTES:
        vocab, end = (NUM_BYTES + 1, NUM_BYTES) if append_eod else (NUM_BYTES, None)
        return Tokenizer(vocab, end, TextTokens(BYTES))
    name = source.removeprefix("hf:")
    if not name:
        raise ConfigError(Problem(f"unknown tokenizer {source!r}", where, f"{BYTES}, or the path of a {FILE}"))
    if name != source and not Path(name).expanduser().exists():
        inner = _opened(lambda loader: loader.from_pretrained(name), name, where)
        ids = {text: token_id for text in END_OF_TEXT if (token_id := inner.token_to_id(text)) is not None}
        vocab, identity = inner.get_vocab_size(), TextTokens(hashlib.sha256(inner.to_str().encode()).hexdigest())
    else:
        file = find_tokenizer(name, where)
        inner = _opened(lambda loader: loader.from_file(str(file.path)), file.path, where)
        vocab, identity, ids = file.vocab, file.identity, dict(file.ids)
    inner.no_truncation()  # a file may have been saved with both, for batches of a model
    inner.no_padding()
    ends = [ids[text] for text in END_OF_TEXT if text in ids]
    if append_eod and not ends:
        message = f"tokenizer {source} has none of {', '.join(END_OF_TEXT)}, which could end a document"
        raise ConfigError(Problem(message, where))
    return Tokenizer(vocab, ends[0] if append_eod else None, identity, inner)


def _opened(load: Callable[[Any], Any], name: Any, where: str) -> Any:
    """A `tokenizers.Tokenizer`. Raises ConfigError, EnvironmentProblem without that package."""
    try:
        from tokenizers import Tokenizer as Loader  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        message = f"tokenizer {name} needs {absence('tokenizers', error)}"
        raise EnvironmentProblem(Problem(message, where, command=INSTALL)) from error
    try:
        return load(Loader)
    except Exception as error:  # the package raises plain Exceptions
        raise ConfigError(Problem(f"{name} is no {FILE} that can be loaded: {error}", where)) from error
