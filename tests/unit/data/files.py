"""Files for tests of data: a tokenizer.json of whole words, and tables of texts."""

from __future__ import annotations

import json
from pathlib import Path

WORDS = ("[UNK]", "one", "two", "three", "</s>")


def word_tokenizer(path: Path, words=WORDS, **more) -> Path:
    """A tokenizer.json that gives a token per word. more: other fields of the file."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": words.index("</s>"), "content": "</s>", "special": True, **flags}]
    model = {"type": "WordLevel", "vocab": {word: number for number, word in enumerate(words)}, "unk_token": "[UNK]"}
    empty = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    content = {"version": "1.0", **empty, "pre_tokenizer": {"type": "Whitespace"}, "added_tokens": added,
               "model": model, **more}  # fmt: skip
    path.write_text(json.dumps(content))
    return path


def jsonl(path: Path, texts, key="text") -> Path:
    path.write_text("".join(json.dumps({key: text}) + "\n" for text in texts))
    return path
