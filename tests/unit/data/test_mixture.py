"""Mixtures: exact shares of every batch, one order under every plan and after every resume, and what `plan` says."""

from __future__ import annotations

import json
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as drawn

from parallelrun.base.errors import ConfigError
from parallelrun.cli.main import main
from parallelrun.config.schema.model_schema import DatasetConfig
from parallelrun.config.schema.run_schema import Config
from parallelrun.data import open_dataset, shares
from parallelrun.data.mixture import parts_of
from parallelrun.data.order import MixedSampler, Sampler, make_sampler
from parallelrun.data.shares import counts_after, whole_weights
from parallelrun.planner.model import definitions
from parallelrun.planner.model.definitions import BatchShare
from parallelrun.planner.model.model_spec import ModelSpec
from tests.unit.data.files import jsonl, word_tokenizer

SIZES = (10, 7, 1000)
WEIGHTS = (5, 3, 2)


def parts(sizes=SIZES, weights=WEIGHTS):
    return tuple(BatchShare(f"part{number}", *pair) for number, pair in enumerate(zip(sizes, weights)))


def sampler(batch=8, seed=3, **options):
    return make_sampler(sum(SIZES), batch, seed, parts(), **options)


def source_of(indices, sizes=SIZES):
    return np.cumsum(sizes).searchsorted(indices, side="right")


@settings(max_examples=30, deadline=None)
@given(
    drawn.lists(drawn.integers(1, 2000), min_size=1, max_size=12).map(tuple),
    drawn.integers(1, 40),
    drawn.integers(0, 300),
)
def test_every_count_differs_from_its_share_by_less_than_one_and_never_falls(weights, batch, start):
    total = sum(weights)
    before = counts_after(weights, batch, start)
    for step in range(start + 1, start + 60):
        counts = counts_after(weights, batch, step)
        assert sum(counts) == step * batch
        assert all(abs(count - Fraction(weight * step * batch, total)) < 1 for count, weight in zip(counts, weights))
        assert all(now >= then for now, then in zip(counts, before))
        before = counts


def test_weights_become_whole_numbers():
    assert whole_weights([Fraction("0.7"), Fraction("0.3")]) == (7, 3)
    assert whole_weights([Fraction(2), Fraction(4), Fraction("0.5")]) == (4, 8, 1)


def test_a_step_far_away_is_counted_at_once_as_step_by_step(monkeypatch):
    weights = (333_333, 666_667)  # no whole number of samples before a million batches
    far = counts_after(weights, 7, 12_345)
    shares._states.cache_clear()
    counts_after.cache_clear()
    counts = (0, 0)
    for step in range(12_345):
        counts = shares._advance(weights, 7, step, counts, 1)
    assert counts == far
    assert counts_after((7, 3), 48, 10**12)[0] == 48 * 10**12 * 7 // 10  # no time for each batch


def test_each_batch_has_the_counts_that_are_due():
    before = np.zeros(3, dtype=int)
    for step in range(1, 60):
        found = np.bincount(source_of(sampler().indices(step, 0, 8)[0]), minlength=3)
        assert (before + found).tolist() == list(sampler().counts(step))
        before += found


def test_each_part_is_used_whole_in_each_of_its_epochs_and_in_another_order():
    indices = np.concatenate([sampler().indices(step, 0, 8)[0] for step in range(1, 41)])
    of_first = indices[source_of(indices) == 0]
    twice = [of_first[start : start + 20].tolist() for start in range(0, 160, 20)]  # two epochs are five batches
    assert len(of_first) == 160 and all(sorted(two) == sorted([*range(10)] * 2) for two in twice)
    assert len({tuple(two) for two in twice}) == 8
    of_last = indices[source_of(indices) == 2]
    assert len(set(of_last.tolist())) == len(of_last) == 64


def test_each_part_and_each_epoch_has_an_order_of_its_own():
    order = make_sampler(32, 8, 0, parts((16, 16), (1, 1)))
    first_four = set()
    for epoch in range(6):  # of four batches, with four samples of each part
        indices = order.indices(4 * epoch + 1, 0, 8)[0]
        first_four |= {frozenset(indices[indices < 16].tolist()), frozenset((indices[indices >= 16] - 16).tolist())}
    assert len(first_four) == 12


def test_places_in_the_batch_are_drawn_so_that_every_replica_has_every_part():
    first_half = [set(source_of(sampler(16).indices(step, 0, 8)[0]).tolist()) for step in range(1, 30)]
    assert sum(found == {0, 1, 2} for found in first_half) > 15
    orders = {tuple(source_of(sampler(16).indices(step, 0, 16)[0]).tolist()) for step in range(1, 30)}
    assert len(orders) > 25


def test_evaluation_takes_each_part_from_its_first_sample():
    indices, _ = sampler(shuffle=False).indices(1, 0, 8)
    assert indices.tolist() == [0, 1, 2, 3, 10, 11, 17, 18]  # of 4, 2.4 and 1.6


def test_another_seed_is_another_order_and_one_dataset_has_the_sampler_that_it_had():
    assert sampler(seed=3).indices(1, 0, 8)[0].tolist() != sampler(seed=4).indices(1, 0, 8)[0].tolist()
    assert type(make_sampler(9, 2, 1, ())) is Sampler and isinstance(sampler(), MixedSampler)


def spec(vocab=256, mask=None):
    return ModelSpec("x", "tokens", (), (8,), (8, 4), 8, vocab, seq=8, mask_token=mask)


@pytest.fixture
def files(tmp_path):
    (tmp_path / "a.txt").write_text("a" * 4000)
    (tmp_path / "b.txt").write_text("b" * 1000)
    return tmp_path


def config(files, *given, batch=10):
    given = given or ({"name": "text", "path": f"{files}/a.txt", "weight": 0.7}, {"name": "text",
                      "path": f"{files}/b.txt", "weight": 0.3})  # fmt: skip
    dataset = DatasetConfig(name="mixture", mixture=list(given), cache=str(files / "cache"))
    return Config(global_batch=batch, dataset=dataset)


class TestDataset:
    def test_samples_of_a_batch_come_from_the_parts(self, files):
        dataset = open_dataset(config(files), spec())
        order = make_sampler(len(dataset.train), 10, 0, dataset.train.shares)
        for step in range(1, 40):
            indices, ids = order.indices(step, 0, 10)
            letters = [chr(dataset.train.augmented(i, n)[0][0]) for i, n in zip(indices.tolist(), ids.tolist())]
            assert letters.count("a") == 7 and letters.count("b") == 3
        assert [one.label for one in dataset.train.shares] == ["a", "b"]
        sizes = [one.num_samples for one in dataset.train.shares]
        assert len(dataset.train) == sum(sizes) and len(dataset.val.shares) == 2
        assert chr(dataset.train.sample(sizes[0] - 1)[0][0]) == "a" and chr(dataset.train.sample(sizes[0])[0][0]) == "b"
        with pytest.raises(IndexError):
            dataset.train.sample(sum(sizes))

    def test_a_part_smaller_than_its_share_of_a_batch_is_repeated(self, files):
        (files / "b.txt").write_text("b" * 40)
        dataset = open_dataset(config(files, batch=48), spec())
        assert dataset.train.shares[1].num_samples < 48 * 0.3

    def test_a_masked_model_reads_the_same_shares(self, files):
        dataset = open_dataset(config(files), spec(257, 256))
        assert dataset.train.shares == open_dataset(config(files), spec()).train.shares and dataset.has_ignored

    def test_data_and_weights_are_in_the_fingerprint(self, files):
        first = open_dataset(config(files), spec()).fingerprint
        parts = config(files).dataset.mixture
        assert open_dataset(config(files, *reversed(parts)), spec()).fingerprint != first
        assert open_dataset(config(files, parts[0], {**parts[1], "weight": 0.4}), spec()).fingerprint != first
        same = config(files, {**parts[0], "weight": 7}, {**parts[1], "weight": 3})
        assert open_dataset(same, spec()).fingerprint == first
        (files / "b.txt").write_text("c" * 1000)
        assert open_dataset(config(files), spec()).fingerprint != first

    def test_keys_of_the_dataset_reach_its_parts(self, files):
        made = config(files, {"name": "text", "path": "x", "val_fraction": 0.5}, {"name": "imagefolder", "path": "x"})
        made.dataset.column, made.dataset.val_fraction = "body", 0.25
        first, second = (part.config.dataset for part in parts_of(made))
        assert (first.column, first.val_fraction, second.val_fraction) == ("body", 0.5, 0.25)
        assert second.flip and not first.flip  # of the preset
        assert [part.label for part in parts_of(made)] == ["x", "x_2"]


@pytest.mark.parametrize(
    "part, said",
    [
        ("text", "must be a mapping with the name of a dataset"),
        ({"weight": 1}, "must be a mapping with the name of a dataset"),
        ({"name": "txt"}, "no such dataset: txt"),
        ({"name": "mixture"}, "no such dataset: mixture"),
        ({"name": "text", "weight": 0}, "weight=0 must be a number above 0"),
        ({"name": "text", "weight": float("inf")}, "weight=inf must be"),
        ({"name": "text", "weight": True}, "weight=True must be"),
        ({"name": "text", "pth": "x"}, "no such key of a dataset: pth"),
        ({"name": "text", "path": 7}, "path=7 is no "),
        ({"name": "text", "cache": "/tmp"}, "no such key of a dataset: cache"),
        ({"name": "text", "mixture": []}, "no such key of a dataset: mixture"),
    ],
)
def test_a_wrong_part_is_named(files, part, said):
    made = config(files, {"name": "pystdlib"}, part)
    with pytest.raises(ConfigError) as caught:
        parts_of(made)
    assert said in str(caught.value) and "dataset.mixture[1]" in str(caught.value)


def test_two_tokenizers_are_refused(files):
    words = str(word_tokenizer(files / "t.json"))
    made = config(files, {"name": "text", "path": "x", "tokenizer": words}, {"name": "pystdlib"})
    with pytest.raises(ConfigError, match=r"need one tokenizer: x by .*t\.json and pystdlib by bytes"):
        definitions.dataset(made).vocab_size(made)


class TestPlan:
    line = ["plan", "model=gpt", "dataset=mixture", "steps=50", "global_batch=10", "model.seq=8"]

    def test_it_shows_tokens_and_epochs_of_every_part(self, files, capsys):
        given = json.dumps(config(files).dataset.mixture).replace('"', "")
        assert main([*self.line, f"dataset.mixture={given}", "--json"]) == 0
        first, second = json.loads(capsys.readouterr().out)["mixture"]
        assert (first["label"], first["share"], first["used"]) == ("a", 0.7, 350)
        assert second["used"] == 150 and second["epochs"] == 150 / second["num_samples"] > 1
        assert main([*self.line, f"dataset.mixture={given}"]) == 0
        shown = capsys.readouterr().out
        assert f"{first['num_samples'] * 8:,}" in shown and "2,800" in shown and f"{second['epochs']:.2f}" in shown

    def test_it_writes_no_tokens(self, files, capsys):
        path = jsonl(files / "c.jsonl", ["text"] * 99)
        given = f"[{{name: text, path: {path}}},{{name: pystdlib}}]"
        assert main([*self.line, f"dataset.mixture={given}", f"dataset.cache={files}/cache", "--json"]) == 0
        first, second = json.loads(capsys.readouterr().out)["mixture"]
        assert first["num_samples"] is None and first["used"] == 250 and second["num_samples"] > 1000
        assert not (files / "cache").exists()

    def test_parts_without_a_mixture_and_a_mixture_without_parts_are_refused(self, capsys):
        assert main(["plan", "model=gpt", "dataset=pystdlib", "dataset.mixture=[{name: text}]"]) == 2
        assert "dataset=mixture" in capsys.readouterr().err
        assert main(["plan", "model=gpt", "dataset=mixture"]) == 2
        assert "dataset=mixture needs its parts" in capsys.readouterr().err
