"""The frozen configuration loads back to the same Config, and resolves to the same plan."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from parallelrun.base.errors import ConfigError
from parallelrun.config.schema.run_schema import Config
from parallelrun.config.schema.strategy_keys import narrowed
from parallelrun.planner.facts.document import document
from parallelrun.planner.resolve.freeze import freeze, identity, load_frozen
from parallelrun.planner.resolve.resolve_config import resolve
from tests.plans import tiny_config, tiny_plan


def test_a_config_comes_back_as_it_was():
    config = tiny_config(tp=2, name="é 'x'", optimizer__lr=1e-5, optimizer__eps=1e-12, path=None)
    config = replace(
        config, model=replace(config.model, roles={"fc.*": "column"}, arguments={"width": [1, {"a": None}]})
    )
    assert load_frozen(freeze(config)) == narrowed(config)


@pytest.mark.parametrize("value", [float("inf"), 1e300, 1e-300, 0.1])
def test_numbers_come_back_exactly(value):
    config = tiny_config(optimizer__lr=value)
    assert load_frozen(freeze(config)).optimizer.lr == value


@pytest.mark.parametrize(
    "overrides",
    [
        {"dp": None, "world": 4, "tp": 2},
        {"dp": None, "tp": None, "pp": None},
        {"pp": 2, "schedule": "gpipe"},
        {"pp": 2, "schedule": "interleaved", "virtual_stages": 2},
        {"dp": 4, "strategy.data.kind": "fsdp", "strategy.data.shard": 2},
        {"dp": 2, "local_batch": 4},
        {"dp": 2, "pp": 2, "microbatches": 4},
    ],
)
def test_a_frozen_config_resolves_to_the_same_plan(overrides):
    config = tiny_config(overrides)
    plan = resolve(config, sweep=True)
    again = resolve(load_frozen(freeze(config, plan)))
    assert replace(again, filled=(), warnings=()) == replace(plan, filled=(), warnings=())


def test_what_was_filled_stands_there_as_numbers():
    config = tiny_config(dp=None, world=4, tp=2)
    frozen = load_frozen(freeze(config, resolve(config)))
    assert (frozen.dp, frozen.world, frozen.device) == (2, 4, "cpu")
    assert frozen.global_batch == 8 and frozen.micro_batch is not None


def test_a_key_that_a_sweep_only_noted_does_not_stop_the_ranks():
    config = tiny_config(schedule="gpipe", staleness=2)  # pp=1: nobody reads either
    plan = resolve(config, sweep=True)
    frozen = load_frozen(freeze(config, plan))
    assert resolve(frozen).world == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nosuch: 1\n", "nosuch: no such key"),
        ("model:\n  layrs: 1\n", "model.layrs: no such key"),
        ("tp: two\n", "tp: 'two' is not of type int"),
        ("compile: 1\n", "compile"),
        ("model: 3\n", "not a mapping"),
        ("- 1\n", "not a mapping"),
        ("a: [\n", "not YAML"),
        ("model: !!python/name:os.system\n", "not YAML"),
    ],
)
def test_a_file_that_is_no_frozen_config_is_refused(text, said):
    with pytest.raises(ConfigError, match=said.replace("(", r"\(")):
        load_frozen(text)


def test_the_plan_of_a_saved_run_can_be_described():
    """A restarted run writes the plan to which it was changed; warnings about it try other plans."""
    overrides = {"dp": 2, "pp": 2, "model.layers": 4}
    plan = tiny_plan(overrides)
    saved = load_frozen(freeze(tiny_config(overrides), plan))
    assert document(resolve(saved), saved)["degrees"] == plan.degrees


def test_a_point_is_known_by_what_it_computes():
    config = tiny_config()
    assert identity(config) == identity(replace(config, name="other", runs="elsewhere", verb="plan"))
    assert identity(config) != identity(replace(config, seed=7))


def test_ranks_need_neither_hydra_nor_torch_to_read_it():
    code = "import sys, parallelrun.planner.resolve.freeze as f; f.load_frozen(sys.stdin.read()); " \
           "print([m for m in ('hydra', 'omegaconf', 'torch') if m in sys.modules])"  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", code], input=freeze(Config()), capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "[]", done.stderr
