"""`parallelrun tokenize`: text in, Megatron's files out, ready to train on."""

from __future__ import annotations

import json
import sys
import types

import pytest

from parallelrun.cli.main import main as program
from parallelrun.config.schema.run_schema import Config
from parallelrun.data import megatron
from parallelrun.data.megatron import open_indexed


def main(arguments):
    return program(["tokenize", *arguments])


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("one é")
    (folder / "b.txt").write_text("two")
    (folder / "empty.txt").touch()
    return folder


def read(prefix):
    indexed = open_indexed(prefix)
    spans = zip(indexed.starts, indexed.lengths)
    return [indexed.tokens[a : a + n].tolist() for a, n in spans], indexed.tokens.dtype.name


def test_every_file_is_a_document_of_bytes(texts, tmp_path, capsys):
    assert main([str(texts), "--output", str(tmp_path / "deep" / "out")]) == 0
    assert read(tmp_path / "deep" / "out") == ([list("one é".encode()), list(b"two")], "uint16")
    assert "2 documents, 9 tokens of vocab 256 (uint16)" in capsys.readouterr().out


def test_an_end_of_document_token_is_appended_on_demand(texts, tmp_path):
    main([str(texts / "b.txt"), "--output", str(tmp_path / "out"), "--append-eod"])
    assert read(tmp_path / "out")[0] == [[*b"two", 256]]
    settings = Config()
    settings.dataset.path = str(tmp_path / "out")
    assert megatron.DATASET.vocab_size(settings) == 257


def test_a_larger_vocab_changes_the_element_type(texts, tmp_path):
    main([str(texts), "--output", str(tmp_path / "out"), "--vocab", "70000"])
    assert read(tmp_path / "out")[1] == "int32"
    assert json.loads((tmp_path / "out.json").read_text())["vocab"] == 70000


@pytest.mark.parametrize(
    "arguments, code, said",
    [
        (["nosuch.txt"], 3, "no such file or folder"),
        (["a.txt", "--tokenizer", "words"], 2, "unknown tokenizer 'words'"),
        (["a.txt", "--vocab", "100"], 2, "below the tokenizer's 256"),
    ],
)
def test_problems_end_with_the_right_code_and_no_traceback(texts, tmp_path, capsys, monkeypatch, arguments, code, said):
    monkeypatch.chdir(texts)
    assert main([*arguments, "--output", str(tmp_path / "out")]) == code
    assert said in capsys.readouterr().err


def test_a_missing_tokenizers_package_says_what_to_install(texts, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert main([str(texts), "--output", str(tmp_path / "out"), "--tokenizer", "hf:gpt2"]) == 3
    assert "pip install 'parallelrun[data]'" in capsys.readouterr().err


def test_a_tokenizer_of_the_tokenizers_package(texts, tmp_path, monkeypatch):
    """Against the package's interface; the package itself is optional and may not be installed."""

    def encode_batch(texts, add_special_tokens):
        assert add_special_tokens is False
        return [types.SimpleNamespace(ids=[len(word) for word in text.split()]) for text in texts]

    words = types.SimpleNamespace(
        get_vocab_size=lambda: 66000,
        token_to_id={"</s>": 65999}.get,
        to_str=lambda: "words",
        no_truncation=int,
        no_padding=int,
        encode_batch=encode_batch,
    )
    tokenizer = types.SimpleNamespace(from_pretrained={"somebody/words": words}.__getitem__)
    monkeypatch.setitem(sys.modules, "tokenizers", types.SimpleNamespace(Tokenizer=tokenizer))
    main([str(texts), "--output", str(tmp_path / "out"), "--tokenizer", "hf:somebody/words", "--append-eod"])
    assert read(tmp_path / "out") == ([[3, 1, 65999], [3, 65999]], "int32")


def test_input_without_text_is_refused_before_anything_is_created(tmp_path, capsys):
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty.txt").touch()
    (tmp_path / "empty.jsonl").write_text("\n")
    for name in ("folder", "empty.txt", "empty.jsonl"):
        assert main([str(tmp_path / name), "--output", str(tmp_path / "out" / "x")]) == 2
        assert "nothing to write" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
