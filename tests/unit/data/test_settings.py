"""What decides which sample comes when is recorded: any change of it that gives a training other samples is named."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parallelrun.checkpoint.data import data_changes
from parallelrun.data import open_dataset
from parallelrun.data.megatron import write_indexed
from parallelrun.data.order import make_sampler
from parallelrun.planner.model import definitions
from parallelrun.planner.model.definitions import Dataset
from parallelrun.planner.resolve.resolve_config import spec_of
from tests.plans import tiny_config
from tests.unit.data.files import jsonl
from tests.vision import RESNET

TOKENS = {"dataset.vocab": None, "model.vocab": 256, "model.seq": 8}
IMAGES = {**RESNET, "dataset.vocab": None, "model.image": 8, "model.channels": 1, "model.vocab": 10}
PARTS = [
    {"name": "text", "path": "TEXT", "weight": 3},
    {"name": "synthetic", "samples": 50, "vocab": 20},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Files of each kind of dataset."""
    folder = tmp_path_factory.mktemp("data")
    draw = np.random.default_rng(3)
    (folder / "text").mkdir()
    for number in range(30):
        (folder / "text" / f"{number:02d}.txt").write_bytes(draw.integers(32, 127, 90, dtype=np.uint8).tobytes())
    for split in ("train", "test"):
        rows = ["".join(map(chr, draw.integers(97, 123, 40))) for _ in range(60)]
        jsonl(folder / f"{split}.jsonl", rows)
    (folder / "both").mkdir()
    for split in ("train", "test"):
        text = (folder / f"{split}.jsonl").read_text()
        (folder / "both" / f"{split}.jsonl").write_text(text.replace('{"text"', '{"body": "other", "text"'))
    documents = [[draw.integers(0, 256, 30)] for _ in range(40)]
    write_indexed(folder / "megatron", documents, np.dtype("<u2"))
    _idx_files(folder / "mnist", draw)
    return folder


def _idx_files(folder: Path, draw: np.random.Generator) -> None:
    folder.mkdir()
    for split, count in (("train", 40), ("t10k", 10)):
        images, labels = draw.integers(0, 256, (count, 28, 28)), draw.integers(0, 10, count)
        for name, array in ((f"{split}-images-idx3-ubyte", images), (f"{split}-labels-idx1-ubyte", labels)):
            sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
            head = bytes((0, 0, 8, array.ndim)) + sizes
            (folder / f"{name}.gz").write_bytes(gzip.compress(head + array.astype(np.uint8).tobytes()))


def opened(folder: Path, changes: dict[str, Any]) -> tuple[Dataset, Any]:
    """The dataset, and the inputs and targets of the first three global batches."""
    changes = {**changes, "dataset.cache": str(folder / "cache")}
    if changes.get("dataset.path"):
        changes["dataset.path"] = str(folder / changes["dataset.path"])
    if parts := changes.get("dataset.mixture"):
        here = {"TEXT": str(folder / "text"), "AGAIN": str(folder / "again")}
        changes["dataset.mixture"] = [
            {**part, **({"path": here[part["path"]]} if "path" in part else {})} for part in parts
        ]
    config = tiny_config(changes)
    problems: list[Any] = []
    spec = spec_of(config, problems)
    assert spec is not None, problems
    dataset = open_dataset(config, spec)
    batch = config.global_batch
    assert batch is not None
    sampler = make_sampler(len(dataset.train), batch, config.seed, dataset.train.shares)
    samples = []
    for step in (1, 2, 3):
        indices, ids = sampler.indices(step, 0, batch)
        samples += [dataset.train.augmented(int(at), int(one)) for at, one in zip(indices, ids)]
    return dataset, samples


def same(left: list[Any], right: list[Any]) -> bool:
    return all(a.shape == b.shape and (a == b).all() for one, two in zip(left, right) for a, b in zip(one, two))


TEXT = {**TOKENS, "dataset.name": "text", "dataset.path": "text"}
ROWS = {**TOKENS, "model.vocab": 257, "dataset.name": "text", "dataset.path": "both"}
BERT = {**TEXT, "model.name": "bert", "model.vocab": 260}
MIXED = {**TOKENS, "dataset.name": "mixture", "dataset.mixture": PARTS}
MNIST = {**IMAGES, "dataset.name": "mnist", "dataset.path": "mnist"}
SYNTHETIC = {"dataset.vocab": 20}
MEGATRON = {**TOKENS, "dataset.name": "megatron", "dataset.path": "megatron"}
LIBRARY = {**TOKENS, "dataset.name": "pystdlib", "dataset.max_bytes": 200_000}
DIGITS = {**IMAGES, "dataset.name": "digits"}
EVEN = {**MIXED, "dataset.mixture": [{**part, "weight": 1} for part in PARTS]}
VAL = {"dataset.val_fraction": 0.5}
SEED = {"seed": 99}
SWAPPED = {f"dataset.mixture[{n}].{key}" for n in (0, 1) for key in ("name", "samples", "vocab")}
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any], set[str]]] = {
    # name: (the training of the checkpoint, what is changed, the keys that are named: empty for those changed)
    "seed": (TEXT, SEED, set()),
    "val_fraction": (TEXT, VAL, set()),
    "a lower val_fraction": ({**TEXT, **VAL}, {"dataset.val_fraction": 0.05}, set()),
    "seq": ({**TEXT, "model.position": "rope"}, {"model.seq": 16}, set()),
    "pack": (TEXT, {"dataset.pack": True}, set()),
    "max_bytes": (TEXT, {"dataset.max_bytes": 1500}, set()),
    "column": (ROWS, {"dataset.column": "body"}, set()),
    "split": (ROWS, {"dataset.split": "test"}, set()),
    "append_eod": (ROWS, {"dataset.append_eod": True}, set()),
    "rows' max_bytes": (ROWS, {"dataset.max_bytes": 1500}, set()),
    "another dataset": (TEXT, {"dataset.name": "synthetic", "dataset.path": None}, {"dataset.name"}),
    "other files": (TEXT, {"dataset.path": "again"}, {"dataset"}),
    "the mask": (BERT, {"model.mask_token": 257}, set()),
    "seed of bert": (BERT, SEED, set()),
    "val_fraction of megatron": (MEGATRON, VAL, set()),
    "val_fraction of the library": (LIBRARY, VAL, set()),
    "max_bytes of the library": (LIBRARY, {"dataset.max_bytes": 600_000}, set()),
    "samples": (SYNTHETIC, {"dataset.samples": 65}, set()),
    "vocab": (SYNTHETIC, {"dataset.vocab": 21}, set()),
    "seed of synthetic": (SYNTHETIC, SEED, set()),
    "weight of a part": (MIXED, {"dataset.mixture": [{**PARTS[0], "weight": 2}, PARTS[1]]},
                         {"dataset.mixture[0].weight"}),
    "key of a part": (MIXED, {"dataset.mixture": [PARTS[0], {**PARTS[1], "samples": 60}]},
                      {"dataset.mixture[1].samples"}),
    "val_fraction of all parts": (MIXED, VAL, {f"dataset.mixture[{number}].val_fraction" for number in (0, 1)}),
    "a part more": (MIXED, {"dataset.mixture": [*PARTS, {"name": "synthetic", "samples": 50, "vocab": 20}]}, set()),
    "files of a part": (MIXED, {"dataset.mixture": [{**PARTS[0], "path": "AGAIN"}, PARTS[1]]}, {"dataset"}),
    "order of parts": (EVEN, {"dataset.mixture": EVEN["dataset.mixture"][::-1]}, SWAPPED),
    "flip": (DIGITS, {"dataset.flip": True}, set()),
    "crop": (DIGITS, {"dataset.crop": 2}, set()),
    "image": (DIGITS, {"model.image": 16}, set()),
    "val_fraction of images": (DIGITS, VAL, set()),
    "seed of mnist": (MNIST, SEED, set()),
    "crop of mnist": (MNIST, {"dataset.crop": 2}, set()),
}  # fmt: skip


def recorded(dataset: Dataset, seed: int = 1234) -> dict[str, Any]:
    return {"dataset": dataset.record, "seed": seed}


@pytest.fixture(scope="module", autouse=True)
def other_files(folder):
    """The same files, of which one has another letter."""
    (folder / "again").mkdir()
    for file in (folder / "text").iterdir():
        content = file.read_bytes()
        (folder / "again" / file.name).write_bytes(b"#" + content[1:] if file.name == "07.txt" else content)


@pytest.mark.parametrize("case", CHANGES)
def test_a_change_that_gives_other_samples_is_named_with_both_values(case, folder):
    base, change, keys = CHANGES[case]
    before, samples = opened(folder, base)
    now, changed_samples = opened(folder, {**base, **change})
    if case not in ("other files", "files of a part"):  # one letter may be in no sample of the first batches
        assert not same(samples, changed_samples)
    changes = data_changes(recorded(before), now)
    assert set(changes) == (keys or set(change))
    for key, value in changes.items():
        assert value[0] != value[1]
        if key in change and key != "dataset.mixture":
            assert value[1] == change[key]


@pytest.mark.parametrize(
    "change",
    [{"steps": 99}, {"dp": 2}, {"tp": 2}, {"optimizer.lr": 0.5}, {"eval.every": 2}, {"dataset.num_workers": 3}],
)
@pytest.mark.parametrize("base", [TEXT, ROWS, MIXED, BERT], ids=["text", "rows", "mixture", "bert"])
def test_what_changes_no_sample_is_no_change(base, change, folder):
    before, samples = opened(folder, base)
    now, same_samples = opened(folder, {**base, **change})
    assert same(samples, same_samples) and data_changes(recorded(before), now) == {}


def test_moved_files_are_the_same_data(folder, tmp_path):
    before, samples = opened(folder, TEXT)
    (tmp_path / "elsewhere").symlink_to(folder / "text")
    now, same_samples = opened(tmp_path, {**TEXT, "dataset.path": "elsewhere"})
    assert same(samples, same_samples) and data_changes(recorded(before), now) == {}


def test_every_key_of_a_dataset_is_recorded_or_known_to_decide_nothing(folder):
    dataset, _ = opened(folder, TEXT)
    keys = {f"dataset.{name}" for name in vars(tiny_config().dataset)}
    unrecorded = {"description", "path", "cache", "num_workers", "tokenizer", "chat_template", "mixture"}
    assert keys - dataset.settings.keys() == {f"dataset.{name}" for name in unrecorded}


def test_a_dataset_of_others_adds_its_own_settings(folder, monkeypatch):
    definition = type(definitions.dataset(tiny_config(TEXT)))
    monkeypatch.setattr(definition, "settings", lambda self, config: {"corpus.version": 2})
    dataset, _ = opened(folder, TEXT)
    older = replace(dataset, settings={**dataset.settings, "corpus.version": 1})
    assert data_changes(recorded(older), dataset) == {"corpus.version": (1, 2)}
