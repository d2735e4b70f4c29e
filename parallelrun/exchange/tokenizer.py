"""The tokenizer of a model, and its files for other programs: a token per byte, or what came with foreign weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parallelrun import definitions
from parallelrun.checkpoint.files import write_bytes
from parallelrun.errors import ConfigError, EnvironmentProblem, Problem
from parallelrun.exchange.source import StoredModel

NUM_BYTES = 256
FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "vocab.txt",
)  # fmt: skip
_MASK = "[MASK]"


def folder_of(source: StoredModel) -> Path | None:
    """The directory with the tokenizer's files of this model: its own, or the one whose weights the run started from.
    None if there are none."""
    started = source.config.init.weights
    folders = [source.path, *([Path(started).expanduser()] if started else [])]
    return next((one for one in folders if any((one / name).is_file() for name in FILES)), None)


def is_bytes(source: StoredModel) -> bool:
    """Whether the tokens of this model are the bytes of texts."""
    return folder_of(source) is None and definitions.dataset(source.config).reads_bytes


def write(source: StoredModel, out: Path) -> None:
    """Write the tokenizer's files, if the model has a tokenizer."""
    folder = folder_of(source)
    if folder is not None:
        for name in FILES:
            if (folder / name).is_file():
                shutil.copyfile(folder / name, out / name)
    elif is_bytes(source):
        for name, content in byte_files(source.spec.seq, source.spec.mask_token).items():
            write_bytes(out / name, json.dumps(content, ensure_ascii=False, indent=1).encode())


class Codec:
    """Text to token ids and back. Raises EnvironmentProblem without the package `tokenizers`, where that is needed."""

    def __init__(self, source: StoredModel):
        folder = folder_of(source)
        self._inner: Any = None
        if folder is not None:
            self._inner = _open(folder / FILES[0])
        elif not is_bytes(source):
            what = f"{source.path} has no tokenizer, and its dataset is not read as bytes"
            raise ConfigError(Problem(what, "text", f"tokens=[1,2,3], or {FILES[0]} beside the weights"))

    def encode(self, text: str) -> list[int]:
        """The token ids of a text, without special tokens."""
        if self._inner is None:
            return list(text.encode())
        return list(self._inner.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids; bytes that are no text become a replacement character."""
        if self._inner is None:
            return bytes(token for token in tokens if token < NUM_BYTES).decode(errors="replace")
        return str(self._inner.decode(list(tokens), skip_special_tokens=False))


def _open(file: Path) -> Any:
    try:
        from tokenizers import Tokenizer  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        what = f"{file} needs the package tokenizers, which is not installed"
        raise EnvironmentProblem(Problem(what, str(file), command="pip install tokenizers")) from error
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the package raises plain Exceptions
        raise ConfigError(Problem(f"{file} is no tokenizer.json: {error}", str(file))) from error


def byte_files(seq: int, mask_token: int | None) -> dict[str, dict[str, Any]]:
    """tokenizer.json and tokenizer_config.json of a token per byte: byte-level BPE without merges."""
    added = []
    if mask_token is not None:
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        added.append({"id": mask_token, "content": _MASK, "special": True, **flags})
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    vocab = {character: byte for byte, character in enumerate(characters())}
    model: dict[str, Any] = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
             "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "vocab": vocab,
             "merges": []}  # fmt: skip
    tokenizer = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
                 "pre_tokenizer": level, "post_processor": None, "decoder": level, "model": model}  # fmt: skip
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": seq,
                              "clean_up_tokenization_spaces": False}  # fmt: skip
    if mask_token is not None:
        config["mask_token"] = _MASK
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": config}


def characters() -> list[str]:
    """The printable character that byte-level BPE writes for each byte (GPT-2's `bytes_to_unicode`)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(NUM_BYTES) if byte not in printable)
    moved = {byte: NUM_BYTES + number for number, byte in enumerate(others)}
    return [chr(moved.get(byte, byte)) for byte in range(NUM_BYTES)]
