"""How many bytes of text each token id stands for, from a tokenizer.json, without the package `tokenizers`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from parallelrun.data.arrays import NDArray, np

_SPACE = "\u2581"  # how SentencePiece writes a space
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_BYTE_FALLBACK = {"Replace", "ByteFallback", "Fuse", "Strip"}
_KEPT = {"Prepend", "Replace"}  # normalizers that only write spaces in another way


def token_bytes(path: Path) -> NDArray[np.int64] | None:
    """Bytes of text by token id, 0 for special tokens; None for a tokenizer of which they do not follow: one that
    changes the text, or whose tokens are no parts of it.

    Known are the tokens of bytes of GPT-2 and Llama 3 (`ByteLevel`), and pieces of SentencePiece with single bytes for
    unknown letters, such as Llama 2's. A space that a tokenizer puts before a text counts as one of its bytes.
    """
    document = json.loads(path.read_bytes())
    decoders = {step["type"] for step in _steps(document.get("decoder"))}
    vocab = document["model"]["vocab"]
    pieces = dict(vocab) if isinstance(vocab, dict) else {piece[0]: index for index, piece in enumerate(vocab)}
    added = document.get("added_tokens") or ()
    lengths = np.zeros(max([*pieces.values(), *(int(entry["id"]) for entry in added)]) + 1, np.int64)
    normalizers = {entry["type"] for entry in _steps(document.get("normalizer"))}
    if decoders == {"ByteLevel"} and not normalizers:
        sizes = {index: len(piece) for piece, index in pieces.items()}  # a letter stands for each byte
    elif "ByteFallback" in decoders and decoders <= _BYTE_FALLBACK and normalizers <= _KEPT:
        sizes = {index: _piece_bytes(piece) for piece, index in pieces.items()}
    else:
        return None
    sizes |= {int(entry["id"]): 0 if entry.get("special") else len(entry["content"].encode()) for entry in added}
    lengths[list(sizes)] = list(sizes.values())
    return lengths


def _steps(part: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """The parts of a decoder or normalizer."""
    if part and part["type"] == "Sequence":
        for step in part.get("decoders", part.get("normalizers", ())):
            yield from _steps(step)
    elif part:
        yield part


def _piece_bytes(piece: str) -> int:
    return 1 if _BYTE.fullmatch(piece) else len(piece.replace(_SPACE, " ").encode())
