"""Which samples share BatchNorm statistics: as asked, as a number, and refused where it cannot be."""

from __future__ import annotations

from typing import Any

import pytest

from parallelrun.base.errors import ConfigError
from parallelrun.launch.host import preflight
from parallelrun.planner.contract.plan import SampleSets
from parallelrun.planner.pieces import sample_sets
from parallelrun.planner.predict import prediction
from parallelrun.planner.resolve.freeze import freeze, load_frozen
from parallelrun.planner.resolve.resolve_config import resolve
from parallelrun.training.verify.checked import single_device as single_device
from tests.plans import tiny_config, tiny_plan
from tests.vision import ALEXNET, RESNET

NORMS = 6  # of the tiny resnet: the stem's, two a block, the shortcut's


def problem(**overrides: Any):
    with pytest.raises(ConfigError) as caught:
        tiny_plan({**RESNET, **{key.replace("__", "."): value for key, value in overrides.items()}})
    (found,) = caught.value.problems
    return found


@pytest.mark.parametrize(
    ("overrides", "sets"),
    [
        ({"dp": 1}, SampleSets(16, spread=False, exchanged=False)),
        ({"dp": 2}, SampleSets(16, spread=True, exchanged=True)),
        ({"dp": 2, "model.norm_samples": "8"}, SampleSets(8, spread=False, exchanged=True)),
        ({"dp": 4, "model.norm_samples": "8"}, SampleSets(8, spread=True, exchanged=True)),
        ({"dp": 2, "microbatches": 4, "model.norm_samples": "local"}, SampleSets(2, spread=False, exchanged=True)),
    ],
)
def test_sets_are_named_by_number(overrides: dict[str, Any], sets: SampleSets) -> None:
    assert tiny_plan({**RESNET, **overrides}).sample_sets == sets


def test_a_model_without_batch_norm_has_none() -> None:
    assert tiny_plan(ALEXNET).sample_sets is None and tiny_plan().sample_sets is None


@pytest.mark.parametrize("asked", [None, "local", "4"])
def test_the_frozen_config_and_the_reference_keep_the_number(asked: str | None) -> None:
    config = tiny_config({**RESNET, "dp": 2, "model.norm_samples": asked})
    plan = resolve(config)
    assert plan.sample_sets is not None
    again = resolve(load_frozen(freeze(config, plan)))
    assert again.sample_sets == plan.sample_sets
    alone = single_device(config, plan)[1]
    assert alone.sample_sets == SampleSets(plan.sample_sets.size, spread=False, exchanged=False)


def test_what_was_filled_in_is_said() -> None:
    assert "model.norm_samples=16 (filled: the global batch)" in tiny_plan(RESNET).filled
    assert (
        "model.norm_samples=8 (filled: the micro-batch)"
        in tiny_plan({**RESNET, "dp": 2, "model.norm_samples": "local"}).filled
    )


def test_several_microbatches_cannot_share_a_set() -> None:
    found = problem(dp=2, microbatches=2)
    assert (
        found.kind == "undefined"
        and "microbatches=1 or model.norm_samples=2 or model.norm_samples=4" in found.suggestion
    )
    assert "microbatches=1" not in problem(pp=2, microbatches=4).suggestion  # a pipeline has several


@pytest.mark.parametrize("asked", ["3", "0", "x", "-2", "1.5"])
def test_sets_must_divide_the_batch(asked: str) -> None:
    assert problem(model__norm_samples=asked).kind == "arithmetic"


def test_replicas_that_go_their_own_ways_share_nothing() -> None:
    found = problem(dp=2, strategy__data__kind="local_sgd")
    assert "do not step together" in found.what and "model.norm_samples=local" in found.suggestion
    plan = tiny_plan({**RESNET, "dp": 2, "strategy.data.kind": "local_sgd", "model.norm_samples": "local"})
    assert plan.sample_sets == SampleSets(8, spread=False, exchanged=False)
    assert not [row for row in prediction.collectives(plan, 0) if row.purpose == "statistics"]


def test_a_replay_of_replicas_in_turn_is_refused_before_anything_starts() -> None:
    overrides = {**RESNET, "dp": 2, "strategy.data.compression": "fp16"}
    config = tiny_config(overrides)
    config.verb = "verify"
    with pytest.raises(ConfigError, match="replicas of ddp in turn"):
        preflight.check(config, tiny_plan(overrides), None)
    sample_sets.check_replay(tiny_plan({**overrides, "model.norm_samples": "local"}))
    sample_sets.check_replay(tiny_plan({**RESNET, "dp": 2}))


def test_layouts_of_images_are_refused_with_their_reason() -> None:
    assert problem(tp=8).kind == "arithmetic" and "4 channels are not divisible by tp=8" in problem(tp=8).what
    with pytest.raises(ConfigError) as caught:
        tiny_plan({**ALEXNET, "tp": 4, "strategy.tensor.kind": "2d"})
    assert [(found.kind, found.where) for found in caught.value.problems] == [("not_built", "layout")]
