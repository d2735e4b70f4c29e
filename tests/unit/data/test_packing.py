"""Packing documents into samples: every token once, little padding, nothing across a document's end."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parallelrun.base.errors import EnvironmentProblem
from parallelrun.data import open_dataset, packing
from parallelrun.data.megatron import write_indexed
from parallelrun.data.packing import best_fit_decreasing, pack
from parallelrun.planner.model.definitions import IGNORED, Dataset, Split
from parallelrun.planner.resolve.resolve_config import spec_of
from tests.plans import tiny_config

SEQ = 16


def lengths(count: int, seed: int = 1) -> np.ndarray:
    found = np.exp(np.random.default_rng(seed).normal(1.8, 1.0, count)).astype(np.int64)
    found[:4] = 0, 1, 2, 3 * SEQ + 2  # nothing, no input, one input, three pieces and a rest
    return found


def naive(sizes: list[int], seq: int) -> list[list[int]]:
    """Best-fit decreasing, a document at a time."""
    samples: list[list[int]] = []
    for size in sorted(sizes, reverse=True):
        fitting = [one for one in samples if sum(one) + size <= seq]
        max(fitting, key=sum).append(size) if fitting else samples.append([size])
    return samples


def test_equal_lengths_together_give_the_samples_of_one_document_at_a_time():
    generator = np.random.default_rng(0)
    for _ in range(50):
        seq = int(generator.integers(4, 40))
        sizes = generator.integers(1, seq + 1, int(generator.integers(1, 60))).tolist()
        found, counts = np.unique(sizes, return_counts=True)
        histogram = list(zip(found[::-1].tolist(), counts[::-1].tolist()))
        packed = [
            [length for length, number in pattern for _ in range(number)]
            for rows, pattern in best_fit_decreasing(histogram, seq)
            for _ in range(rows)
        ]
        assert sorted(map(sum, packed)) == sorted(map(sum, naive(sizes, seq)))
        assert sorted(itertools.chain(*packed)) == sorted(sizes)


@pytest.mark.parametrize("shift", [0, 1])
def test_every_input_of_every_document_is_in_one_sample(shift, monkeypatch):
    monkeypatch.setattr(packing, "WINDOW", 100)
    given = lengths(350)
    packs = packing._pack(given, SEQ, shift, 7)
    used = np.concatenate([np.arange(s, s + n) for s, n in zip(packs.starts, packs.lengths)])
    ends = np.cumsum(given)
    expected = np.concatenate([np.arange(end - n, end - shift) for end, n in zip(ends, given)])
    assert np.array_equal(np.sort(used), expected)
    sizes = [int(packs.lengths[packs.pieces(index)].sum()) for index in range(len(packs))]
    assert max(sizes) <= SEQ and min(sizes) > 0 and packs.cut == int((given - shift > SEQ).sum())
    found = packs.packing()
    assert found.tokens == pytest.approx(np.mean(sizes)) and 1 - found.tokens / SEQ < 0.05


def test_the_seed_decides_among_equal_documents_and_a_result_is_kept():
    given = np.full(400, 5)
    one, same, other = pack(given, SEQ, 1, 3), pack(given.copy(), SEQ, 1, 3), pack(given, SEQ, 1, 4)
    assert one is same and not np.array_equal(one.starts, other.starts)
    assert np.array_equal(np.sort(one.starts), np.sort(other.starts))


@pytest.mark.parametrize("given", [[], [0, 0], [1, 1, 0]])
def test_documents_without_an_input_give_no_sample(given):
    assert len(pack(np.array(given, dtype=np.int64), SEQ, 1, 0)) == 0


def open_packed(folder: Path, documents: list[np.ndarray], **changes: Any) -> tuple[Dataset, Any]:
    write_indexed(folder / "data", [[one] for one in documents], np.dtype("<u2"))
    settings = {
        "dataset.name": "megatron",
        "dataset.path": str(folder / "data"),
        "dataset.vocab": 60,
        "global_batch": 2,
    }
    config = tiny_config({**settings, "model.seq": SEQ, "model.vocab": None, "dataset.pack": True, **changes})
    problems: list[Any] = []
    spec = spec_of(config, problems)
    assert spec is not None and not problems
    return open_dataset(config, spec), spec


def written(count: int = 60) -> list[np.ndarray]:
    generator = np.random.default_rng(3)
    return [generator.integers(1, 60, size) for size in lengths(count)]


def read(split: Split) -> list[tuple[int, ...]]:
    """The documents of all samples, inputs and last target; asserts what every sample must keep."""
    found = []
    for index in range(len(split)):
        inputs, targets = split.sample(index)
        own = split.document_lengths(index)
        assert inputs.shape == targets.shape == (SEQ,) and own.min() > 0
        used = int(own.sum())
        assert (targets[used:] == IGNORED).all() and (targets[:used] != IGNORED).all()
        for stop, length in zip(np.cumsum(own), own):
            assert np.array_equal(inputs[stop - length + 1 : stop], targets[stop - length : stop - 1])
            found.append((*inputs[stop - length : stop].tolist(), int(targets[stop - 1])))
    return found


def pieces(documents: list[np.ndarray]) -> list[tuple[int, ...]]:
    return [tuple(one[start : start + SEQ + 1].tolist()) for one in documents for start in range(0, len(one) - 1, SEQ)]


def test_a_megatron_file_is_packed_by_document(tmp_path):
    documents = written()
    dataset, _ = open_packed(tmp_path, documents)
    assert sorted(read(dataset.train) + read(dataset.val)) == sorted(pieces(documents))
    assert dataset.has_ignored and dataset.train.packs


def test_a_label_that_crosses_a_documents_end_is_seen(tmp_path, monkeypatch):
    documents = written()
    dataset, _ = open_packed(tmp_path, documents)
    right = type(dataset.train).sample

    def wrong(self: Split, index: int) -> tuple[np.ndarray, np.ndarray]:
        inputs, targets = right(self, index)
        last = int(self.document_lengths(index)[0]) - 1
        targets[last] = inputs[min(last + 1, SEQ - 1)]
        return inputs, targets

    monkeypatch.setattr(type(dataset.train), "sample", wrong)
    assert sorted(read(dataset.train) + read(dataset.val)) != sorted(pieces(documents))


def test_jsonl_keeps_its_documents_in_the_token_cache(tmp_path):
    texts = ["ab", "", "c", "a longer text of more than sixteen bytes", *(f"text {number}" for number in range(40))]
    (tmp_path / "docs.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    changes = {"dataset.path": str(tmp_path / "docs.jsonl"), "dataset.cache": str(tmp_path / "cache")}
    config = tiny_config({"dataset.name": "text", "model.seq": SEQ, "model.vocab": None, "dataset.vocab": None,
                          "dataset.pack": True, "global_batch": 2, **changes})  # fmt: skip
    spec = spec_of(config, [])
    assert spec is not None
    dataset = open_dataset(config, spec)
    expected = pieces([np.frombuffer(text.encode(), np.uint8) for text in texts])
    assert sorted(read(dataset.train) + read(dataset.val)) == sorted(expected)


def test_masked_documents_are_whole_and_padding_is_never_hidden(tmp_path):
    documents = written()
    dataset, spec = open_packed(tmp_path, documents, **{"model.name": "bert", "model.preset": "bert"})
    found = 0
    for split in (dataset.train, dataset.val):
        assert split.packs, "else the model is not told where documents begin"
        for index in range(len(split)):
            inputs, targets = split.sample(index)
            used = int(split.document_lengths(index).sum())
            hidden = targets != IGNORED
            assert hidden[:used].any() and not hidden[used:].any() and not inputs[used:].any()
            found += used
    assert found == sum(map(len, documents)) and spec.mask_token == 60


def test_a_token_outside_the_vocab_is_named(tmp_path):
    documents = written()
    documents[5][0] = 61
    dataset, _ = open_packed(tmp_path, documents)
    with pytest.raises(EnvironmentProblem, match=re.escape("token id 61 of sample")):
        read(dataset.train), read(dataset.val)


def test_no_sample_is_refused(tmp_path):
    with pytest.raises(EnvironmentProblem, match="training samples"):
        open_packed(tmp_path, [np.array([1]) for _ in range(30)])


def test_a_mixture_packs_each_part():
    parts = [{"name": "synthetic", "samples": 9, "weight": 3}, {"name": "synthetic", "samples": 40, "weight": 1}]
    changes = {"dataset.name": "mixture", "dataset.mixture": parts, "dataset.vocab": None, "dataset.pack": True}
    config = tiny_config({**changes, "model.seq": 64})
    spec = spec_of(config, [])
    assert spec is not None
    dataset = open_dataset(config, spec)
    train, first = dataset.train, dataset.train.splits[0]  # type: ignore[attr-defined]
    assert train.packs and dataset.has_ignored
    assert np.array_equal(train.document_lengths(9), train.splits[1].document_lengths(0))  # type: ignore[attr-defined]
    second = train.splits[1].packing()  # type: ignore[attr-defined]
    assert train.packing().tokens == pytest.approx(0.75 * first.packing().tokens + 0.25 * second.tokens)
    for index in range(9):
        _, targets = train.sample(index)
        own = train.document_lengths(index)
        assert own.sum() <= 64 and (targets[: own.sum()] >= 0).all() and (targets[own.sum() :] == IGNORED).all()
