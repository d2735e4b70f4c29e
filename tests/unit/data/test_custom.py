"""`dataset=custom`: what a user's function returns, as samples; what it may not return."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parallelrun.base.errors import ConfigError
from parallelrun.data.custom import DATASET
from parallelrun.planner.resolve.resolve_config import resolve
from tests.plans import tiny_config

NETS = Path(__file__).parents[1] / "other_nets.py"


def config_of(function: str, **more: Any) -> Any:
    module = {"model.name": "module", "model.preset": "module", "model.source": f"{NETS}:towers", "model.vocab": None}
    source = {"dataset.name": "custom", "dataset.source": f"{NETS}:{function}", "dataset.vocab": None}
    return tiny_config({**module, **source, "global_batch": 8, **more})


def opened(function: str, **more: Any) -> Any:
    config = config_of(function, **more)
    return DATASET.open(config, resolve(config).spec)


def test_items_are_divided_by_hash_unless_the_function_divides_them():
    by_hash, divided = opened("items"), opened("divided_items")
    assert len(by_hash.train) + len(by_hash.val) == 200 and 0 < len(by_hash.val) < 60
    assert (len(divided.train), len(divided.val)) == (200, 40)


def test_a_dict_is_the_input_without_its_labels():
    inputs, target = opened("items").train.sample(0)
    assert sorted(inputs) == ["left", "right"] and inputs["left"].dtype == np.float32 and target.dtype == np.int64


@pytest.mark.parametrize(("samples", "length", "is_cut"), [(50, 50, True), (500, 120, False)])
def test_an_iterable_is_read_up_to_a_limit_which_a_note_says(samples, length, is_cut):
    config = config_of("stream", **{"dataset.samples": samples})
    plan = resolve(config)
    dataset = DATASET.open(config, plan.spec)
    (note,) = DATASET.notes(config, plan.spec, dataset)
    assert len(dataset.train) + len(dataset.val) == length
    assert f"{length} items" in note and ("later ones are never read" in note) == is_cut


def test_the_fingerprint_follows_the_items():
    assert opened("items").fingerprint == opened("items").fingerprint != opened("divided_items").fingerprint


def test_items_that_draw_random_numbers_have_the_fingerprint_of_their_number():
    drawn = [opened("drawn_items").fingerprint for _ in range(2)]
    assert drawn[0] == drawn[1] != opened("items").fingerprint


@pytest.mark.parametrize(
    ("key", "function", "text"),
    [
        ("dataset.source", "a_number", "no items by index"),
        ("dataset.source", "texts", "holds a str"),
        ("dataset.source", "triples", "has 3 parts"),
        ("dataset.source", "nosuch", "no function"),
        ("model.loss", "no_pair", "not the pair"),
        ("model.loss", "nan_count", "the count nan"),
        ("model.loss", "negative_count", "must be a number >= 0"),
        ("model.loss", "count_of_two", "must be a number >= 0"),
        ("model.loss", "nosuch", "has no function"),
    ],
)
def test_a_function_that_breaks_its_contract_is_refused_by_its_name_before_the_run(key, function, text):
    with pytest.raises(ConfigError, match=text) as refusal:
        resolve(config_of("items", **{key: f"{NETS}:{function}"}))
    assert function in str(refusal.value) and refusal.value.problems[0].where == key


def test_two_keys_that_name_one_file_share_its_classes():
    resolve(config_of("items", **{"model.loss": f"{NETS}:loss_of_towers_only"}))


def test_targets_with_fractions_need_a_loss():
    vision = {"model.source": f"{NETS}:resnet18"}
    with pytest.raises(ConfigError, match="number with a fraction"):
        opened("regression", **vision)


@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_an_own_loss_is_not_divided(axis):
    with pytest.raises(ConfigError, match="runs the whole module"):
        resolve(config_of("items", **{"model.loss": f"{NETS}:contrastive_loss", axis: 2}))
