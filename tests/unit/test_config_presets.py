"""Every preset of every group composes, and every strategy's smallest plan and every recipe is legal."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parallelrun.config import compose, presets, recipes
from parallelrun.config.keys import GROUPS
from parallelrun.config.overrides import read
from parallelrun.plan.resolve import resolve


def composed(*overrides: str):
    parsed, problems = read(list(overrides), False, "here")
    assert not problems
    return compose.compose_plainly(compose.prepare(parsed, (), "plan", False))[0]


def plan(*overrides: str):
    found = composed(*overrides)
    return resolve(found.config, given=found.given)


@pytest.mark.parametrize("group", [group for group in GROUPS if group != "recipe"])
def test_every_option_says_what_it_is(group):
    for option in presets.described(group):
        assert option.description and option.name and option.source == "built-in"


def test_the_defaults_are_what_the_documentation_says():
    config = composed().config
    assert (config.strategy.name, config.model.name, config.dataset.name) == ("ptdp", "gpt", "pystdlib")
    assert (config.optimizer.name, config.precision.name, config.cluster.name) == ("adamw", "fp32", "local")
    assert config.tp is None and config.world is None and config.runs == "runs"


SMALLEST_WORLDS = {
    "single": 1, "ddp": 2, "zero1": 2, "fsdp": 2, "hsdp": 4, "tp": 2, "model_parallel": 2,
    "tp2d": 4, "tp25d": 8, "tp3d": 8, "gpipe": 2, "1f1b": 2, "interleaved": 2, "zero_bubble": 2, "ptdp": 4,
    "ps": 4, "ring": 2, "horovod": 2, "zero2": 2, "local_sgd": 2, "diloco": 2,
    "gshard": 2, "switch": 2, "expert_choice": 2, "dropless": 2, "aux_free": 2,
}  # fmt: skip


@pytest.mark.parametrize(("strategy", "world"), SMALLEST_WORLDS.items())
def test_a_strategy_alone_is_its_smallest_plan(strategy, world):
    of_experts = presets.values("strategy", strategy).get("expert", {}).get("fills")
    found = plan(f"strategy={strategy}", *(["model=moe_gpt"] if of_experts else []))
    assert found.preset == strategy and found.world == world


def test_every_strategy_of_the_folder_was_tried_above():
    assert set(presets.options("strategy")) == set(SMALLEST_WORLDS)


def test_the_presets_are_the_models_of_their_papers():
    sizes = {
        "gpt2_124m": 124e6, "gpt3_13b": 13e9, "gpt3_175b": 175e9, "gpt_1t": 1008e9, "mt_nlg_530b": 530e9,
        "llama2_7b": 6.74e9, "llama2_13b": 13.0e9, "llama3_8b": 8.03e9, "llama3_70b": 70.6e9,
    }  # fmt: skip
    for model, parameters in sizes.items():
        assert plan(f"model={model}", "strategy=single").spec.num_parameters == pytest.approx(parameters, rel=0.012), (
            model
        )


@pytest.mark.parametrize(
    "overrides", ["tp=8 pp=4", "pp=4 strategy=interleaved", "pp=4 strategy=zero_bubble schedule=zbv", "tp=8 dp=2"]
)
def test_the_small_gpt_divides_by_what_is_promised(overrides):
    assert plan("model=gpt", *overrides.split()).batch.global_batch == 48


@pytest.mark.parametrize("name", sorted(name for name, file in recipes.find({}).items() if file.source == "built-in"))
def test_every_recipe_is_described_and_legal(name):
    found = composed(f"recipe={name}")
    assert recipes.find({})[name].description
    assert resolve(found.config, given=found.given).world >= 1
    loaded = recipes.load(replace(recipes.find({})[name], source="user"))  # built-in ones obey the strangers' rules too
    assert loaded.keys <= found.given


def test_the_recipe_of_the_issue_is_the_plan_of_the_issue():
    found = plan("recipe=gpt3_oneflow_3072")
    assert found.world == 3072 and found.degrees == {"pp": 64, "dp": 6, "tp": 8, "ep": 1}


def test_the_order_of_precedence_is_preset_recipe_command_line():
    assert composed("strategy=hsdp").config.strategy.data.shard == 2
    assert composed("strategy=hsdp", "strategy.data.shard=4").config.strategy.data.shard == 4
    assert composed("recipe=quickstart").config.tp == 2
    assert composed("recipe=quickstart", "tp=4", "strategy=tp").config.tp == 4
    assert composed("recipe=quickstart", "strategy=tp").config.strategy.name == "tp"


def test_what_was_given_is_known():
    found = composed("recipe=quickstart", "model.layers=4", "path=/x")
    assert {"tp", "pp", "steps", "eval.every", "model.layers", "dataset.path", "recipe", "strategy"} <= found.given
    assert "dp" not in found.given and "verb" not in found.given and "path" not in found.given
    assert found.overrides == ("recipe=quickstart", "model.layers=4", "dataset.path=/x")
    assert found.config.dataset.path == "/x" and found.config.path is None


WITH_ROUTERS = [name for name in presets.options("model") if "router" in presets.values("model", name)]


@pytest.mark.parametrize("model", WITH_ROUTERS)
def test_no_strategy_changes_how_a_preset_of_a_model_routes(model):
    alone = composed(f"model={model}")
    router = resolve(alone.config, given=alone.given).spec.router
    for strategy in presets.options("strategy"):
        own = presets.values("strategy", strategy).get("router")
        if own:
            found = composed(f"model={model}", f"strategy={strategy}", "dp=8", "global_batch=64")
            plan = resolve(found.config, given=found.given)
            assert plan.spec.router == router, strategy
            note = [text for text in plan.warnings if "keeps its own router" in text]
            assert bool(note) == any(getattr(router, key) != value for key, value in own.items()), strategy


def test_the_router_of_a_model_of_the_users_own_is_kept_too(tmp_path):
    text = (presets.folder() / "model" / "moe_gpt.yaml").read_text() + "\nrouter:\n  capacity_factor: 3.0\n"
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text(text)
    found = composed("model=mine", "strategy=gshard", f"hydra.searchpath=['file://{tmp_path}']")
    assert resolve(found.config, given=found.given).spec.router.capacity_factor == 3.0


def test_the_user_and_a_preset_of_experts_change_a_router():
    for words, factor in (
        (["model=gshard_600b"], 1.0),
        (["model=gshard_600b", "model.router.capacity_factor=2.0"], 2.0),
        (["model=gshard_600b", "model.own_router=false"], 1.25),
        (["model=moe_gpt"], 1.25),
    ):
        found = composed(*words, "strategy=gshard", "dp=8", "global_batch=64")
        assert resolve(found.config, given=found.given).spec.router.capacity_factor == factor
