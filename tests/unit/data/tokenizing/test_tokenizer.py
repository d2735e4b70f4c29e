"""Tokenizers: what a plan needs of a tokenizer.json, and text to tokens in `dataset=text` and `tokenize`."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pytest

from parallelrun.base.errors import CheckpointError, ConfigError, DataError, EnvironmentProblem
from parallelrun.checkpoint.data import check_tokenizer
from parallelrun.cli.main import main
from parallelrun.config.schema.model_schema import DatasetConfig
from parallelrun.config.schema.run_schema import Config
from parallelrun.data import open_dataset
from parallelrun.data.document_files import find_documents
from parallelrun.data.megatron import open_indexed
from parallelrun.data.tokenizing import token_cache, token_writer
from parallelrun.data.tokenizing.token_cache import cached_tokens
from parallelrun.data.tokenizing.tokenizer import find_tokenizer, load_tokenizer
from parallelrun.planner.model.definitions import BYTES
from parallelrun.planner.model.model_spec import ModelSpec
from tests.exchange import make
from tests.extras import needs
from tests.unit.data.files import jsonl, word_tokenizer

DOCUMENTS = ["one two three"] * 400


def spec(vocab=5):
    return ModelSpec("x", "tokens", (), (8,), (8, 4), 8, vocab, seq=8)


def config(path, cache, **dataset):
    made = Config(global_batch=4, dataset=DatasetConfig(name="text", path=str(path), cache=str(cache), **dataset))
    made.model.seq = 8
    return made


@pytest.fixture
def words(tmp_path):
    return word_tokenizer(tmp_path / "tokenizer.json")


def read(prefix):
    indexed = open_indexed(prefix)
    return [indexed.tokens[a : a + n].tolist() for a, n in zip(indexed.starts, indexed.lengths)]


class TestFile:
    def test_vocabulary_and_digest_are_read_without_the_package(self, words, monkeypatch):
        import sys

        monkeypatch.setitem(sys.modules, "tokenizers", None)
        for source in (words, words.parent):
            found = find_tokenizer(str(source), "x")
            assert (found.vocab, found.sha256) == (5, hashlib.sha256(words.read_bytes()).hexdigest())
        with pytest.raises(EnvironmentProblem, match="needs the package tokenizers"):
            load_tokenizer(str(words), False)

    def test_the_largest_id_decides_not_the_number_of_entries(self, words):
        content = json.loads(words.read_text())
        content["model"]["vocab"]["far"] = 70
        words.write_text(json.dumps(content))
        assert find_tokenizer(str(words), "x").vocab == 71
        content["added_tokens"].append({"id": 99, "content": "<s>"})
        words.write_text(json.dumps(content))
        assert find_tokenizer(str(words), "x").vocab == 100

    def test_the_pieces_of_a_unigram_are_numbered(self, words):
        words.write_text(json.dumps({"model": {"type": "Unigram", "vocab": [["a", -1.0], ["b", -2.0]]}}))
        assert find_tokenizer(str(words), "x").vocab == 2

    @pytest.mark.parametrize("content", ["", "[]", "{}", '{"model": {"vocab": {}}}', '{"model": {"vocab": {"a": ""}}}'])
    def test_another_file_is_refused(self, words, content):
        words.write_text(content)
        with pytest.raises(ConfigError, match=r"tokenizer\.json is no tokenizer\.json"):
            find_tokenizer(str(words), "x")

    def test_a_missing_file_is_refused_by_plan_too(self, tmp_path, capsys):
        assert main(["plan", "dataset=text", f"path={tmp_path}", f"tokenizer={tmp_path}/none.json"]) == 2
        assert "there is no file" in capsys.readouterr().err

    def test_a_vocabulary_below_the_tokenizer_s_is_refused_and_an_unset_one_is_its(self, words, tmp_path, capsys):
        line = ["plan", "model=gpt", "dataset=text", f"path={tmp_path}", f"tokenizer={words}"]
        assert main([*line, "model.vocab=4"]) == 2
        assert "model.vocab=4, but dataset text has 5 token ids" in capsys.readouterr().err
        assert main([*line, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["model"]["vocab"] == 5

    def test_a_dataset_that_reads_no_tokenizer_refuses_it(self, words, capsys):
        assert main(["plan", "dataset=pystdlib", f"tokenizer={words}"]) == 2
        assert "dataset.tokenizer" in capsys.readouterr().err


@needs("tokenizers")
class TestTokens:
    def test_tokenize_writes_tokens_their_tokenizer_and_its_digest(self, words, tmp_path, capsys):
        path = jsonl(tmp_path / "a.jsonl", ["one two", "", " ", "three 1"])
        out = tmp_path / "out"
        assert main(["tokenize", str(path), f"output={out}", f"tokenizer={words}", "--append-eod"]) == 0
        assert read(out) == [[1, 2, 4], [3, 0, 4]]
        note = json.loads((tmp_path / "out.json").read_text())
        assert note["tokenizer_sha256"] == hashlib.sha256(words.read_bytes()).hexdigest()
        assert note["sha256"]["out.bin"] == hashlib.sha256((tmp_path / "out.bin").read_bytes()).hexdigest()
        assert note["text_bytes"] == 15 and note["tokens"] == 6
        assert "2 documents, 6 tokens of vocab 5 (uint16), 2.50 bytes per token" in capsys.readouterr().out
        trained = Config(dataset=DatasetConfig(name="megatron", path=str(out)), global_batch=1)
        from parallelrun.planner.model import definitions

        assert definitions.dataset(trained).tokenizer(trained).sha256 == note["tokenizer_sha256"]

    def test_settings_for_batches_of_a_model_are_not_applied(self, tmp_path):
        cut = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
        padded = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
                  "pad_type_id": 0, "pad_token": "[UNK]"}  # fmt: skip
        path = word_tokenizer(tmp_path / "t.json", truncation=cut, padding=padded)
        tokens = load_tokenizer(str(path), False).encode([b"one two three", b"one"])
        assert [one.tolist() for one in tokens] == [[1, 2, 3], [1]]

    def test_text_that_is_no_utf_8_is_named_with_its_file(self, words, tmp_path, capsys):
        (tmp_path / "bad.txt").write_bytes(b"one \xff two")
        assert main(["tokenize", str(tmp_path / "bad.txt"), f"output={tmp_path}/out", f"tokenizer={words}"]) == 4
        assert "bad.txt: no UTF-8 text" in capsys.readouterr().err
        assert not [one for one in tmp_path.iterdir() if one.name.startswith("out")]

    def test_a_long_text_has_the_tokens_and_the_end_that_it_has_at_once(self, words, tmp_path, monkeypatch):
        (tmp_path / "a.txt").write_text("one two\nthree\n" * 50)
        for piece in (2**20, 32):
            monkeypatch.setattr("parallelrun.data.document_files.TEXT_PIECE", piece)
            main(["tokenize", f"{tmp_path}/a.txt", f"output={tmp_path}/{piece}", f"tokenizer={words}", "--append-eod"])
            assert read(tmp_path / str(piece)) == [[1, 2, 3] * 50 + [4]]

    def test_text_is_tokenized_once_and_again_only_after_a_change(self, words, tmp_path, monkeypatch):
        path, cache = jsonl(tmp_path / "a.jsonl", DOCUMENTS), tmp_path / "cache"
        written = []
        write = token_writer.write_indexed
        monkeypatch.setattr(token_cache, "ProcessPoolExecutor", InThisProcess)
        monkeypatch.setattr(token_writer, "write_indexed", lambda *given: written.append(1) or write(*given))
        settings = config(path, cache, tokenizer=str(words))
        first = open_dataset(settings, spec())
        assert first.tokenizer == hashlib.sha256(words.read_bytes()).hexdigest() and first.vocab == 5
        assert {int(one) for one in first.train.sample(0)[0]} == {1, 2, 3}
        assert open_dataset(settings, spec()).fingerprint == first.fingerprint and len(written) == 1
        word_tokenizer(words, ("[UNK]", "two", "one", "three", "</s>"))
        assert open_dataset(settings, spec()).fingerprint != first.fingerprint and len(written) == 2
        settings.dataset.append_eod = True
        open_dataset(settings, spec())
        jsonl(path, DOCUMENTS[1:])
        os.utime(path, ns=(1, 1))
        open_dataset(settings, spec())
        assert len(written) == 4
        assert not list(cache.glob("*.part"))

    def test_a_process_of_its_own_writes_and_its_error_is_the_user_s(self, words, tmp_path):
        path = jsonl(tmp_path / "a.jsonl", [*DOCUMENTS, 7])
        with pytest.raises(DataError, match=r"a\.jsonl:401: 'text' is no string, but 7") as caught:
            open_dataset(config(path, tmp_path / "cache", tokenizer=str(words)), spec())
        assert caught.value.exit_code == 4 and caught.value.problems[0].where == "dataset.path"
        assert [one.suffix for one in (tmp_path / "cache").iterdir()] == [".lock"]


class InThisProcess:
    def __init__(self, *_):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def submit(self, function, *arguments):
        function(*arguments)
        return self

    def result(self):
        pass


def test_tables_of_text_are_read_as_bytes_without_a_tokenizer(tmp_path, monkeypatch):
    monkeypatch.setattr(token_cache, "ProcessPoolExecutor", InThisProcess)
    path = jsonl(tmp_path / "a.jsonl", ["abcdefgh"] * 60)
    dataset = open_dataset(config(path, tmp_path / "cache"), spec(256))
    assert bytes(dataset.train.sample(0)[0].tolist()) == b"abcdefgh" and dataset.tokenizer == BYTES


def test_only_so_many_bytes_of_text_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(token_cache, "ProcessPoolExecutor", InThisProcess)
    path = jsonl(tmp_path / "a.jsonl", ["abcdefgh"] * 60)
    files, _ = find_documents(path, "text", None)
    prefix = cached_tokens(files, BYTES, config(path, tmp_path / "cache", max_bytes=20))
    assert read(prefix) == [list(b"abcdefgh")] * 3


def test_the_default_folder_of_tokens_is_the_user_s_cache(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert token_cache.cache_folder(Config()) == Path("/x/parallelrun/tokens")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert token_cache.cache_folder(Config()) == Path.home() / ".cache" / "parallelrun" / "tokens"


def test_a_failed_tokenization_leaves_the_older_files(tmp_path, capsys):
    good, bad = jsonl(tmp_path / "a.jsonl", ["good"]), jsonl(tmp_path / "b.jsonl", ["worse"] * 3000 + [7])
    assert main(["tokenize", str(good), f"output={tmp_path}/out"]) == 0
    before = {path: path.read_bytes() for path in tmp_path.glob("out.*")}
    assert main(["tokenize", str(bad), f"output={tmp_path}/out"]) == 4
    assert {path: path.read_bytes() for path in tmp_path.glob("out.*")} == before and len(before) == 3


def test_an_interrupted_replacement_leaves_no_pair_that_does_not_belong_together(tmp_path, monkeypatch):
    good, other = jsonl(tmp_path / "a.jsonl", ["good"]), jsonl(tmp_path / "b.jsonl", ["other text"])
    assert main(["tokenize", str(good), f"output={tmp_path}/out"]) == 0

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("parallelrun.data.megatron.os.replace", stop)
    main(["tokenize", str(other), f"output={tmp_path}/out"])
    assert not (tmp_path / "out.idx").exists() and not list(tmp_path.glob("*.part"))


def test_a_large_file_is_tokenized_in_bounded_memory(tmp_path):
    """30 MB of lines, of which at most 15 MB may be in memory: tracemalloc sees Python's and numpy's memory."""
    import tracemalloc

    line = json.dumps({"text": "x" * 20_000}) + "\n"
    (tmp_path / "a.jsonl").write_text(line * 1500)
    tracemalloc.start()
    assert main(["tokenize", f"{tmp_path}/a.jsonl", f"output={tmp_path}/out"]) == 0
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (tmp_path / "out.bin").stat().st_size == 2 * 30_000_000
    assert peak < 15e6, f"{peak / 1e6:.0f} MB"


class TestResume:
    def check(self, before, words):
        extra = {"dataset": {"name": "text", "fingerprint": None, **before}}
        check_tokenizer(extra, config("x", "y", tokenizer=str(words)), Path("step_1"))

    def test_another_tokenizer_is_refused(self, words):
        with pytest.raises(CheckpointError, match="step_1 was trained with the tokenizer of sha256 abc") as caught:
            self.check({"tokenizer": "abc"}, words)
        assert caught.value.exit_code == 4
        with pytest.raises(CheckpointError):
            self.check({"tokenizer": BYTES}, words)

    def test_the_same_and_an_unknown_one_are_not(self, words):
        self.check({"tokenizer": hashlib.sha256(words.read_bytes()).hexdigest()}, words)
        self.check({"tokenizer": None}, words)
        self.check({}, words)


class TestExchange:
    """Exports, `generate` and `eval` use the tokenizer that made the data."""

    @pytest.fixture
    def source(self, words):
        from dataclasses import replace

        found = make("LlamaForCausalLM", vocab=5)
        data = DatasetConfig(name="text", path="gone", tokenizer=str(words))
        return replace(found, path=Path("nowhere"), config=replace(found.config, dataset=data))

    def test_an_export_has_its_files_and_those_beside_it(self, source, words, tmp_path):
        from parallelrun.checkpoint.exchange import tokenizer

        out = tmp_path / "out"
        out.mkdir()
        tokenizer.write(source, out)
        assert (out / "tokenizer.json").read_bytes() == words.read_bytes()
        assert json.loads((out / "tokenizer_config.json").read_text())["tokenizer_class"] == "PreTrainedTokenizerFast"
        (words.parent / "special_tokens_map.json").write_text("{}")
        assert set(tokenizer.files_of(source)) == {"tokenizer.json", "special_tokens_map.json"}

    @needs("tokenizers")
    def test_text_is_encoded_with_it(self, source):
        from parallelrun.checkpoint.exchange.tokenizer import codec

        own = codec(source)
        assert own.encode([b"two one"])[0].tolist() == [2, 1] and not own.decode([2]).strip("two")

    def test_scoring_uses_it_and_refuses_another(self, source, words, tmp_path):
        from parallelrun.checkpoint.exchange.tokenizer import with_own_tokenizer

        asked = config("x", "y")
        assert with_own_tokenizer(source, asked).dataset.tokenizer == str(words)
        other = word_tokenizer(tmp_path / "other.json", ("[UNK]", "two", "one", "three", "</s>"))
        with pytest.raises(ConfigError, match="is not the model's"):
            with_own_tokenizer(source, config("x", "y", tokenizer=str(other)))


def test_bytes_are_what_they_were():
    tokens = load_tokenizer(BYTES, False).encode([b"\xff\r\n", b""])
    assert [one.tolist() for one in tokens] == [[255, 13, 10], []] and tokens[0].dtype == np.int64
