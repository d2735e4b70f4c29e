"""Megatron's .bin/.idx files: byte-compatible, checked before use, and trained on across documents."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from parallelrun.base.errors import EnvironmentProblem
from parallelrun.config.schema.run_schema import Config
from parallelrun.data import megatron, open_dataset
from parallelrun.data.megatron import element_type, open_indexed, write_indexed
from parallelrun.planner.model.model_spec import ModelSpec

# The example of the shared notes: documents [1..5] as sequences of 3 and 2, and [7, 8]; uint16.
EXAMPLE = [[np.array([1, 2, 3]), np.array([4, 5])], [np.array([7, 8])]]


def spec(vocab=300, seq=4):
    return ModelSpec("test", "tokens", (), (seq,), (seq, 4), seq, vocab, seq=seq)


def config(prefix, batch=1, **dataset):
    made = Config(global_batch=batch)
    made.dataset.name, made.dataset.path, made.model.seq = "megatron", str(prefix), 4
    for key, value in dataset.items():
        setattr(made.dataset, key, value)
    return made


def documents(count, seed=0, largest=300):
    generator = np.random.default_rng(seed)
    return [[generator.integers(0, largest, int(generator.integers(3, 30)))] for _ in range(count)]


@pytest.fixture
def example(tmp_path):
    write_indexed(tmp_path / "x", EXAMPLE, np.dtype("<u2"))
    return tmp_path / "x"


def test_the_example_is_written_byte_for_byte(example):
    expected = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 3, 3)
    expected += struct.pack("<3i", 3, 2, 2) + struct.pack("<3q", 0, 6, 10) + struct.pack("<3q", 0, 2, 3)
    assert example.with_suffix(".idx").read_bytes() == expected and len(expected) == 94
    assert example.with_suffix(".bin").read_bytes() == struct.pack("<7H", 1, 2, 3, 4, 5, 7, 8)


def test_it_reads_back(example):
    indexed = open_indexed(example)
    assert indexed.tokens.tolist() == [1, 2, 3, 4, 5, 7, 8]
    assert indexed.starts.tolist() == [0, 5] and indexed.lengths.tolist() == [5, 2]


@pytest.mark.parametrize("kind", ["<u1", "<i1", "<i2", "<i4", "<i8", "<u2"])
def test_every_integer_type_reads_back(tmp_path, kind):
    made = documents(20, largest=100)
    write_indexed(tmp_path / "x", made, np.dtype(kind))
    indexed = open_indexed(tmp_path / "x")
    assert indexed.tokens.dtype == np.dtype(kind)
    assert indexed.tokens.tolist() == [int(token) for (sequence,) in made for token in sequence]


def test_the_element_type_follows_the_vocab():
    assert [element_type(vocab).name for vocab in (256, 65499, 65500, 128256)] == ["uint16", "uint16", "int32", "int32"]


def test_windows_cross_documents_and_splits_keep_documents_whole(tmp_path):
    made = documents(400)
    write_indexed(tmp_path / "x", made, np.dtype("<i4"))
    dataset = open_dataset(config(tmp_path / "x", val_fraction=0.2), spec())
    read = {}
    for name, split in (("train", dataset.train), ("val", dataset.val)):
        read[name] = [int(token) for index in range(len(split)) for token in split.sample(index)[0]]
    sizes = sum(sequence.size for (sequence,) in made)
    assert 0.1 < len(read["val"]) / sizes < 0.3
    assert sizes - 2 * 5 <= len(read["train"]) + len(read["val"]) <= sizes

    def text(tokens):
        return " " + " ".join(str(int(token)) for token in tokens) + " "

    joined = {name: text(tokens) for name, tokens in read.items()}
    whole = [sum(text(sequence)[1:] in joined[name] for (sequence,) in made) for name in ("train", "val")]
    assert sum(whole) >= 398  # every document lies whole in one split, but for the tail of each


def test_the_suffix_may_be_given_too(example):
    settings = config(str(example) + ".bin")
    assert len(open_dataset(settings, spec(seq=1)).train) > 0


def test_multimodal_modes_are_passed_over(example):
    with example.with_suffix(".idx").open("ab") as stream:
        stream.write(b"\x00\x01\x00")
    assert open_indexed(example).starts.size == 2


def test_a_token_above_the_vocab_names_sample_and_byte(example):
    dataset = open_dataset(config(example), spec(vocab=4, seq=1))
    with pytest.raises(
        EnvironmentProblem, match=r"token id [4578] of sample \d \(byte (6|8|10|12) of .*x\.bin\).*vocab 4"
    ):
        for split in (dataset.train, dataset.val):
            for index in range(len(split)):
                split.sample(index)


DAMAGES = {
    "another magic": (lambda raw: b"WRONG" + raw[5:], "no Megatron index"),
    "another version": (lambda raw: raw[:9] + struct.pack("<Q", 2) + raw[17:], "version 2"),
    "an unknown type": (lambda raw: raw[:17] + b"\x09" + raw[18:], "element type 9"),
    "a type of floats": (lambda raw: raw[:17] + b"\x07" + raw[18:], "element type 7"),
    "cut off": (lambda raw: raw[:-3], "truncated"),
    "a wrong length": (lambda raw: raw[:34] + struct.pack("<i", 99) + raw[38:], "running sum"),
    "a wrong boundary": (lambda raw: raw[:-8] + struct.pack("<q", 77), "document boundaries"),
    "a huge count": (lambda raw: raw[:18] + struct.pack("<Q", 2**60) + raw[26:], "truncated"),
    "empty": (lambda raw: b"", "no Megatron index"),
}


@pytest.mark.parametrize(("damage", "said"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_index_is_refused_before_use(example, damage, said):
    path = example.with_suffix(".idx")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(EnvironmentProblem, match=said) as caught:
        open_indexed(example)
    assert caught.value.exit_code == 3 and "x.idx" in str(caught.value)


def test_truncated_tokens_are_refused_before_use(example):
    path = example.with_suffix(".bin")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(EnvironmentProblem, match=r"x\.bin is truncated: 13 bytes, its index describes 14"):
        open_indexed(example)


def test_missing_files_are_named(tmp_path):
    with pytest.raises(EnvironmentProblem, match=r"cannot read .*nosuch\.idx: No such file"):
        open_dataset(config(tmp_path / "nosuch"), spec())


def test_an_empty_pair_is_too_small(tmp_path):
    write_indexed(tmp_path / "x", [], np.dtype("<u2"))
    with pytest.raises(EnvironmentProblem, match=r"0 documents, 0 tokens.*gives 0 training"):
        open_dataset(config(tmp_path / "x"), spec())


def test_a_token_too_large_for_the_type_leaves_no_files(tmp_path):
    with pytest.raises(ValueError, match="70000 does not fit uint16"):
        write_indexed(tmp_path / "x", [[np.array([70000])]], np.dtype("<u2"))
    assert list(tmp_path.iterdir()) == []


class TestVocabSize:
    def test_the_largest_token_decides(self, example):
        assert megatron.DATASET.vocab_size(config(example)) == 9

    def test_a_given_vocab_wins_and_needs_no_file(self, tmp_path):
        assert megatron.DATASET.vocab_size(config(tmp_path / "nosuch", vocab=77)) == 77

    def test_the_note_of_tokenize_decides(self, example):
        megatron.beside(example, ".json").write_text('{"vocab": 257}')
        assert megatron.DATASET.vocab_size(config(example)) == 257

    @pytest.mark.parametrize("note", ["", "[]", '{"vocab": "many"}', "{"])
    def test_a_foreign_note_is_passed_over(self, example, note):
        megatron.beside(example, ".json").write_text(note)
        assert megatron.DATASET.vocab_size(config(example)) == 9

    def test_a_huge_file_is_not_read_through(self, example, monkeypatch):
        monkeypatch.setattr(megatron, "SCAN_BYTES", 4)
        with pytest.raises(EnvironmentProblem, match="too large to look"):
            megatron.DATASET.vocab_size(config(example))
