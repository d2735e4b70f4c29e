"""`dataset=labelled`: texts with classes, padded and cut off; and samples in halves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parallelrun.base.errors import ConfigError, DataError, EnvironmentProblem
from parallelrun.data import derived, labelled, open_dataset
from parallelrun.planner.model.definitions import Dataset
from parallelrun.planner.model.model_spec import ModelSpec
from parallelrun.planner.model.model_spec.text import LABELLED, TextSamples
from tests.plans import narrow_config, tiny_plan

ROWS = [{"text": f"{'good' if n % 2 else 'bad'} number {n}", "label": n % 2} for n in range(40)]
SPEC = ModelSpec("hf", "tokens", (), (12,), (12, 8), 1, 2, seq=12, text=TextSamples(LABELLED, 257, 256))


def config(path: Path, rows: list[Any] | None = None, **more: Any) -> Any:
    if rows is not None:
        path.write_text("\n".join(map(json.dumps, rows)))
    overrides = {"dataset.name": "labelled", "dataset.path": str(path), "dataset.vocab": None, "global_batch": 4}
    return narrow_config({**overrides, **{key.replace("__", "."): value for key, value in more.items()}})


def opened(path: Path, rows: list[Any], **more: Any) -> Dataset:
    return open_dataset(config(path, rows, **more), SPEC)


def test_texts_are_padded_cut_off_and_numbered_by_class(tmp_path: Path) -> None:
    given = config(tmp_path / "a.jsonl", [*ROWS, {"text": "short", "label": 1}])
    dataset = open_dataset(given, SPEC)
    samples = [split.sample(index) for split in (dataset.train, dataset.val) for index in range(len(split))]
    assert len(samples) == 41 and labelled.DATASET.vocab_size(given) == 2
    short = next(tokens for tokens, _ in samples if tokens[-1] == 256)
    assert bytes(short[:5].tolist()) == b"short" and (short[5:] == 256).all()
    assert all(int(label) == (bytes(tokens[:4].tolist()) != b"bad ") for tokens, label in samples)
    assert "35 of 41 texts" in labelled.DATASET.notes(given, SPEC, dataset)[0]


def test_a_text_stays_in_its_split_whatever_else_there_is(tmp_path: Path) -> None:
    def held_out(rows: list[Any]) -> set[bytes]:
        val = opened(tmp_path / "a.jsonl", rows, dataset__val_fraction=0.3).val
        return {val.sample(index)[0].tobytes() for index in range(len(val))}

    texts = [{"text": f"{n:x}" * 3, "label": "x"} for n in range(30)]
    assert held_out(texts[:20]) <= held_out(texts) and held_out(texts[:20])


def test_labels_may_be_texts_and_change_the_fingerprint(tmp_path: Path) -> None:
    first = opened(tmp_path / "a.jsonl", [{**row, "label": str(row["label"])} for row in ROWS])
    other = opened(tmp_path / "a.jsonl", [{**row, "label": str(1 - row["label"])} for row in ROWS])
    assert first.fingerprint != other.fingerprint and first.vocab == 2


@pytest.mark.parametrize(
    "row, said", [("{", "no JSON"), ('{"label": 1}', "no JSON object with a text"), ('{"text": "a"}', "'label'")]
)
def test_a_broken_row_is_named(tmp_path: Path, row: str, said: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n" + row)
    with pytest.raises(DataError, match=r"a\.jsonl:2") as caught:
        open_dataset(config(path), SPEC)
    assert said in str(caught.value)


def test_what_is_no_labelled_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(EnvironmentProblem, match=r"no \.jsonl file"):
        open_dataset(config(tmp_path / "a.txt"), SPEC)
    big = ModelSpec("hf", "tokens", (), (12,), (12, 8), 1, 2, seq=12, text=TextSamples(LABELLED, 100, 99))
    with pytest.raises(ConfigError, match="not below the model's 100"):
        open_dataset(config(tmp_path / "b.jsonl", ROWS), big)
    with pytest.raises(ConfigError, match="gives labelled texts, and model=gpt reads tokens"):
        tiny_plan({"dataset.name": "labelled", "dataset.path": str(tmp_path / "b.jsonl"), "dataset.vocab": None})


def test_halves_have_the_targets_of_the_second_half() -> None:
    plan, given = tiny_plan(), narrow_config()
    dataset = open_dataset(given, plan.spec)
    halved = derived.halve(dataset)
    (tokens, targets), (whole, following) = halved.train.sample(3), dataset.train.sample(3)
    assert np.array_equal(tokens, whole) and np.array_equal(targets, following[4:])
    assert halved.fingerprint != dataset.fingerprint


@pytest.mark.extras
def test_a_cut_text_keeps_the_special_tokens_of_its_tokenizer(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[CLS]": 0, "[SEP]": 1, "bad": 2, "good": 3, "number": 4, "[UNK]": 5}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    ends = [("[CLS]", 0), ("[SEP]", 1)]
    made.post_processor = tokenizers.processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    made.save(str(tmp_path / "tokenizer.json"))
    spec = ModelSpec("hf", "tokens", (), (4,), (4, 8), 1, 2, seq=4, text=TextSamples(LABELLED, 7, 6))
    given = config(tmp_path / "a.jsonl", [*ROWS, {"text": "good", "label": 1}], dataset__tokenizer=str(tmp_path))
    dataset = open_dataset(given, spec)
    texts = {tuple(s.sample(index)[0].tolist()) for s in (dataset.train, dataset.val) for index in range(len(s))}
    assert texts == {(0, 2, 4, 1), (0, 3, 4, 1), (0, 3, 1, 6)}
    assert "40 of 41" in labelled.DATASET.notes(given, spec, dataset)[0]
