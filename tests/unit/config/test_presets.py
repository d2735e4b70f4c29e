"""Every preset of every group composes, and every strategy's smallest plan and every recipe is legal."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from parallelrun.base.errors import ConfigError
from parallelrun.base.precision import TABLE
from parallelrun.config import compose, presets
from parallelrun.config.keys import GROUPS
from parallelrun.config.overrides import read
from parallelrun.planner.facts.document import document as describe
from parallelrun.planner.predict import cluster_cost, prediction, simulate
from parallelrun.planner.resolve.resolve_config import resolve
from tests.matrix import FULL


@cache
def composed(*overrides: str):
    parsed, problems = read(list(overrides), False, "here")
    assert not problems
    return compose.compose_once(compose.prepare(parsed, (), "plan", False))[0]


@cache
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
    assert (config.optimizer.name, config.precision.name, config.cluster.name) == ("adamw", "auto", "local")
    assert config.tp is None and config.world is None and config.runs == "runs"


SMALLEST_WORLDS = {
    "single": 1, "ddp": 2, "naive_ddp": 2, "zero1": 2, "fsdp": 2, "hsdp": 4, "tp": 2, "model_parallel": 2,
    "tp2d": 4, "tp25d": 8, "tp3d": 8, "gpipe": 2, "1f1b": 2, "interleaved": 2, "zero_bubble": 2, "ptdp": 4,
    "ps": 4, "ring": 2, "horovod": 2, "zero2": 2, "local_sgd": 2, "diloco": 2,
    "gshard": 2, "switch": 2, "expert_choice": 2, "dropless": 2, "aux_free": 2,
}  # fmt: skip


@pytest.mark.parametrize(("strategy", "world"), SMALLEST_WORLDS.items())
def test_a_strategy_alone_is_its_smallest_plan(strategy, world):
    of_experts = presets.values("strategy", strategy).get("expert", {}).get("fills")
    found = plan(f"strategy={strategy}", *(["model=moe_gpt"] if of_experts else []))
    assert found.preset == strategy and found.world == world


def test_the_sweep_of_the_readme_compares_four_different_plans():
    degrees = [plan(f"strategy={name}", "world=4").degrees for name in ("ddp", "tp", "gpipe", "ptdp")]
    assert [(found["dp"], found["tp"], found["pp"]) for found in degrees] == [
        (4, 1, 1), (1, 4, 1), (1, 1, 4), (1, 2, 2),
    ]  # fmt: skip


def test_the_schedules_of_the_pipeline_lesson_differ_in_nothing_but_the_schedule():
    kinds = ("gpipe", "1f1b", "interleaved", "zero_bubble")
    plans = [plan("recipe=pipelines", f"strategy={kind}") for kind in kinds]
    assert {found.batch for found in plans} == {plans[0].batch} and plans[0].batch.microbatches == 16
    bubbles = [simulate.of_plan(found).bubble_of_total for found in plans]
    assert bubbles[0] == pytest.approx(bubbles[1]) and bubbles[1] > bubbles[2] > bubbles[3], bubbles


def test_a_large_batch_becomes_microbatches_that_fit_and_no_more_than_the_device_asks():
    # 12 microbatches of 8 samples, and 425 GiB, when 1F1B was given exactly pp
    found = plan(
        "model=gpt3_175b", "global_batch=1536", "tp=8", "pp=12", "dp=16", "cluster=a100_80gb", "precision=bf16"
    )
    assert found.batch.microbatches >= 48
    assert max(memory.total for memory in prediction.memories(found).values()) < 80e9


@pytest.mark.parametrize("cluster", sorted(set(presets.options("cluster")) - {"local"}))
def test_every_cluster_says_how_fast_each_precision_is(cluster):
    found = composed(f"cluster={cluster}").config.cluster
    rates = {name: cluster_cost.peak_flops(found, name) for name in TABLE}
    assert rates["fp64"] <= rates["fp32"] <= rates["bf16"] <= rates["fp16"], rates
    text = (Path(compose.__file__).parents[2] / "conf" / "cluster" / f"{cluster}.yaml").read_text()
    assert "TFLOP/s by dtype" in text or "TFLOP/s of a rank by dtype" in text, "the unit and the source"


@pytest.mark.parametrize(
    ("given", "fp32", "bf16"),
    [(["cluster=a100_80gb"], 19.5, 312.0), (["cluster=a100_80gb", "cluster.peak_tflops=100"], 100.0, 100.0),
     (["cluster=a100_80gb", "cluster.peak_tflops.bf16=250"], 19.5, 250.0), (["cluster.peak_tflops.bf16=7"], None, 7.0),
     (["cluster.peak_tflops={fp32: 1.5}"], 1.5, None), ([], None, None)],
)  # fmt: skip
def test_the_rate_of_a_device_is_one_number_or_one_per_precision(given, fp32, bf16):
    cluster = composed(*given).config.cluster
    found = [cluster_cost.peak_flops(cluster, name) for name in ("fp32", "bf16")]
    assert found == [None if rate is None else rate * 1e12 for rate in (fp32, bf16)]


@pytest.mark.parametrize(
    ("given", "key"),
    [("cluster.peak_tflops=-1", "cluster.peak_tflops"), ("cluster.peak_tflops.fp32=fast", "cluster.peak_tflops.fp32"),
     ("cluster.peak_tflops.fp3=1", "cluster.peak_tflops"),
     ("cluster.peak_tflops={bf16: 0}", "cluster.peak_tflops.bf16")],
)  # fmt: skip
def test_a_rate_that_is_none_is_refused(given, key):
    with pytest.raises(ConfigError) as caught:
        plan(given)
    assert [problem.where for problem in caught.value.problems] == [key]


def test_every_strategy_of_the_folder_was_tried_above():
    searching = {name for name in presets.options("strategy") if presets.values("strategy", name).get("searches")}
    assert set(presets.options("strategy")) - searching == set(SMALLEST_WORLDS) and searching == {"auto"}


def test_the_presets_are_the_models_of_their_papers():
    sizes = {
        "gpt2_124m": 124e6, "gpt3_13b": 13e9, "gpt3_175b": 175e9, "gpt_1t": 1008e9, "mt_nlg_530b": 530e9,
        "llama2_7b": 6.74e9, "llama2_13b": 13.0e9, "llama3_8b": 8.03e9, "llama3_70b": 70.6e9,
    }  # fmt: skip
    for model, parameters in sizes.items():
        assert plan(f"model={model}", "strategy=single").spec.num_parameters == pytest.approx(parameters, rel=0.012), (
            model
        )


def test_gpt2_xl_has_every_parameter_of_the_paper_s_model():
    found = plan("model=gpt2_1.5b", "strategy=single").spec
    assert (found.num_parameters, found.vocab, found.seq) == (1_557_611_200, 50257, 1024)


SC21 = ("model=gpt3_175b", "tp=8", "pp=8", "dp=16", "micro_batch=1", "global_batch=1536", "recompute=full",
        "precision=bf16", "cluster=a100_80gb")  # fmt: skip


def test_300_billion_tokens_take_gpt3_34_days_on_1024_a100():
    """Narayanan et al. (SC21), section 5: 34 days at 140 TFLOP/s a GPU."""
    found = composed(*SC21, "tokens=300e9")
    document = describe(resolve(found.config, given=found.given), found.config)
    training = document["training"]
    assert document["world"] == 1024 and training["steps"] == 95_368
    assert 34.0 <= training["sustained"] < 34.5
    longest, shortest = training["at_peak"]
    assert shortest <= longest < training["sustained"], "the peak rate is not reached"
    step = document["cost"]["compute_s"] + document["cost"]["communication_s"]
    assert longest == pytest.approx(step * 95_368 / 86_400)


def test_days_are_asked_of_plan_alone_and_of_models_of_tokens():
    config = replace(composed("model=gpt").config, tokens=1e9)
    with pytest.raises(ConfigError, match="read by plan only, not by run"):
        resolve(replace(config, verb="run"))
    with pytest.raises(ConfigError, match="reads images, not tokens"):
        plan("model=resnet", "strategy=ddp", "tokens=1e9")
    assert describe(resolve(config), config)["training"]["sustained"] is None, "no rates"


def test_the_recipe_of_the_issue_is_the_plan_of_the_issue():
    found = plan("recipe=gpt3_oneflow_3072")
    assert found.world == 3072 and found.degrees == {"pp": 64, "dp": 6, "cp": 1, "tp": 8, "ep": 1}


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


OWN_ROUTERS = {
    name: own for name in presets.options("strategy") if (own := presets.values("strategy", name).get("router"))
}
WITH_ROUTERS = [name for name in presets.options("model") if "router" in presets.values("model", name)]


@pytest.mark.parametrize("model", WITH_ROUTERS)
def test_no_strategy_changes_how_a_preset_of_a_model_routes(model):
    alone = composed(f"model={model}")
    router = resolve(alone.config, given=alone.given).spec.router
    first = 0 if FULL else WITH_ROUTERS.index(model) % 2  # every second strategy, the others with the next model
    for strategy, own in list(OWN_ROUTERS.items())[first :: 1 if FULL else 2]:
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
