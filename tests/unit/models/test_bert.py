"""bert: published sizes, modules that hold what the spec lists, both directions seen, masked samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from parallelrun.base.errors import ConfigError
from parallelrun.base.precision import TABLE
from parallelrun.config.schema.run_schema import Config
from parallelrun.data import open_dataset
from parallelrun.data.derived import IGNORED, RATE, MaskedSplit
from parallelrun.models import initialise
from parallelrun.models.bert import network, spec
from parallelrun.models.network import Network
from tests.plans import tiny_config, tiny_plan

PRESETS = Path(__file__).parents[3] / "conf" / "model"
SMALL: dict[str, Any] = {"model.name": "bert", "model.preset": "bert", "model.layers": 2}


def preset_spec(name: str):
    config = Config()
    for key, value in yaml.safe_load((PRESETS / f"{name}.yaml").read_text()).items():
        setattr(config.model, key, value)
    return spec.MODEL.make(config, 256)


def built(overrides: dict[str, Any], seed: int = 3) -> Network:
    config = tiny_config({**SMALL, **overrides})
    made = spec.MODEL.make(config, 31)
    bert = network.build(config, made, TABLE["fp64"])
    with torch.no_grad():
        for name, parameter in bert.named_parameters():
            parameter.copy_(initialise.logical(made.parameters[name], seed))
    return bert


# Hugging Face's BertForMaskedLM has 109,514,298 and 335,174,458: with 2 token types, left out here.
@pytest.mark.parametrize(
    ("name", "published", "hidden"), [("bert_base", 109_514_298, 768), ("bert_large", 335_174_458, 1024)]
)
def test_presets_have_the_published_number_of_parameters(name: str, published: int, hidden: int) -> None:
    assert preset_spec(name).num_parameters == published - 2 * hidden


def test_modules_hold_exactly_what_the_spec_lists() -> None:
    bert, made = built({}), spec.MODEL.make(tiny_config(SMALL), 31)
    assert {name: tuple(p.shape) for name, p in bert.named_parameters()} == {
        name: p.shape for name, p in made.parameters.items()
    }


def test_a_position_sees_what_comes_after_it() -> None:
    """A gpt would give the same logits at position 0; an encoder must not."""
    bert = built({})
    tokens = torch.arange(8).unsqueeze(0)
    changed = tokens.clone()
    changed[0, -1] = 20
    assert not torch.allclose(bert(tokens)[0, 0], bert(changed)[0, 0])


def test_what_makes_a_bert_cannot_be_changed() -> None:
    with pytest.raises(ConfigError) as caught:
        tiny_plan({**SMALL, "model.norm": "rmsnorm"})
    assert "model.norm=layernorm" in str(caught.value.problems[0].suggestion)


def test_the_mask_token_needs_an_id_of_its_own() -> None:
    config = tiny_config({**SMALL, "dataset.name": "pystdlib", "dataset.vocab": None, "model.vocab": 256})
    with pytest.raises(ConfigError) as caught:
        spec.MODEL.make(config, 256)
    assert caught.value.problems[0].suggestion == "model.vocab=257"
    config.model.vocab = None
    assert spec.MODEL.make(config, 256).vocab == 257
    config.model.mask_token = 255
    with pytest.raises(ConfigError, match=r"model\.mask_token=255 is the id of a byte") as caught:
        spec.MODEL.make(config, 256)
    assert caught.value.problems[0].suggestion == "leave model.mask_token out"
    config.model.vocab = 300
    with pytest.raises(ConfigError, match=r"model\.mask_token=255 is the id of a byte") as caught:
        spec.MODEL.make(config, 256)
    assert caught.value.problems[0].suggestion == "model.mask_token=256"


@pytest.mark.parametrize(("mask", "vocab"), [(99_999, None), (256, None), (300, 300)])
def test_a_mask_token_outside_the_vocabulary_is_refused(mask: int, vocab: int | None) -> None:
    data = {"dataset.name": "pystdlib", "dataset.vocab": None, "model.vocab": vocab, "model.mask_token": mask}
    with pytest.raises(ConfigError, match=f"model.mask_token={mask} is outside the vocabulary") as caught:
        tiny_plan({**SMALL, **data})
    assert [problem.suggestion for problem in caught.value.problems] == [f"model.vocab={mask + 1}"]
    assert tiny_plan({**SMALL, **data, "model.vocab": mask + 1}).spec.mask_token == mask


def test_a_mask_token_in_the_middle_is_never_drawn_as_a_random_token() -> None:
    split = masked(**{"model.mask_token": 7, "model.vocab": 32})
    inputs, targets = (np.stack(parts) for parts in zip(*(split.sample(i) for i in range(400))))
    originals = np.stack([split.inner.sample(i)[0] for i in range(400)])
    chosen = targets != IGNORED
    counts = np.bincount(inputs[chosen & (inputs != originals)], minlength=32)
    assert counts[7] / chosen.sum() == pytest.approx(0.8 * 31 / 32, abs=0.03)
    others = np.delete(counts, 7)
    assert len(others) == 31 and others.min() > 0.4 * others.mean()


def masked(**overrides: Any) -> MaskedSplit:
    config = tiny_config({**SMALL, "model.seq": 64, "dataset.samples": 400, **overrides})
    return open_dataset(config, spec.MODEL.make(config, 32)).train  # type: ignore[return-value]


def test_masks_are_what_bert_describes() -> None:
    split = masked()
    inputs, targets = (np.stack(parts) for parts in zip(*(split.sample(i) for i in range(400))))
    originals = np.stack([split.inner.sample(i)[0] for i in range(400)])
    chosen = targets != IGNORED
    assert chosen.mean() == pytest.approx(RATE, abs=0.01)
    assert (targets[chosen] == originals[chosen]).all()
    assert (inputs[~chosen] == originals[~chosen]).all()
    assert (inputs[chosen] == 31).mean() == pytest.approx(0.8, abs=0.02)
    assert (originals < 31).all()
    assert (inputs[chosen] == originals[chosen]).mean() == pytest.approx(0.1 + 0.1 / 31, abs=0.02)


def test_masks_follow_from_seed_and_sample_alone() -> None:
    first, again = masked().sample(5), masked().sample(5)
    assert all((a == b).all() for a, b in zip(first, again))
    assert (masked(seed=7).sample(5)[0] != first[0]).any()


def test_every_sample_has_something_to_fill_in() -> None:
    split = masked(**{"model.seq": 2})
    assert all((split.sample(i)[1] != IGNORED).any() for i in range(50))
