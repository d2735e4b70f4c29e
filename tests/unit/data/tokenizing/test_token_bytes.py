"""Bytes of text by token: they add up to the text, or they are not known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from parallelrun.checkpoint.exchange.tokenizer import byte_files
from parallelrun.data.tokenizing.token_bytes import token_bytes
from tests.extras import needs

TEXT = "The quick brown fox: naïve café — 東京, 12 monkeys 🙈\n\tthe the the quick quick fox. " * 3


def written(folder: Path, tokenizer: Any) -> Path:
    (folder / "tokenizer.json").write_text(tokenizer if isinstance(tokenizer, str) else json.dumps(tokenizer))
    return folder / "tokenizer.json"


@needs("tokenizers")
@pytest.mark.parametrize("normalizer", [None, "Lowercase"])
def test_tokens_of_bytes_add_up_to_the_text(tmp_path, normalizer):
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    if normalizer:
        made.normalizer = getattr(normalizers, normalizer)()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"])
    )
    found = token_bytes(written(tmp_path, made.to_str()))
    if normalizer:
        assert found is None  # letters may have other lengths
        return
    ids = made.encode(TEXT + "<|endoftext|>").ids
    assert len(ids) < len(TEXT.encode()) and ids[-1] == 0
    assert found is not None and found[ids].sum() == len(TEXT.encode())


@needs("tokenizers")
def test_pieces_with_bytes_for_unknown_letters_add_up_to_the_text(tmp_path):
    from tokenizers import Tokenizer, decoders, models, normalizers

    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *map(chr, range(97, 123)), "\u2581", "th", "the"]
    merges = [("t", "h"), ("th", "e")]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    made = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    made.normalizer = normalizers.Replace(" ", "\u2581")
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence(parts)
    found = token_bytes(written(tmp_path, made.to_str()))
    ids = made.encode(TEXT).ids
    assert vocab["the"] in ids and vocab["<0xF0>"] in ids
    assert found is not None and found[ids].sum() == len(TEXT.encode())


def test_our_own_file_of_bytes_and_one_of_words(tmp_path):
    found = token_bytes(written(tmp_path, byte_files(128, None)["tokenizer.json"]))
    assert found is not None and found[:256].tolist() == [1] * 256
    words = {"model": {"type": "WordPiece", "vocab": {"a": 0, "##b": 1}}, "decoder": {"type": "WordPiece"}}
    assert token_bytes(written(tmp_path, words)) is None
    assert token_bytes(written(tmp_path, {**words, "decoder": None})) is None
