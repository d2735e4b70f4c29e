"""`stack=`: the program whose steps are predicted, which is this one where anything runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parallelrun.base.errors import ConfigError
from parallelrun.config import presets
from parallelrun.planner.resolve.resolve_config import resolve
from tests.unit.config.test_presets import composed

NAMES = ("megatron_lm_2021", "megatron_core", "megatron_deepspeed", "torchtitan", "nanotron", "llm_foundry", "nemo")


@pytest.mark.parametrize("verb", ["run", "verify", "bench"])
@pytest.mark.parametrize("words", [("stack=megatron_core",), ("stack.bucket=5",)])
def test_no_run_is_another_programs(verb, words):
    config = replace(composed("model=gpt", "dp=2", *words).config, verb=verb)
    with pytest.raises(ConfigError) as raised:
        resolve(config)
    (problem,) = raised.value.problems
    assert problem.where == "stack" and problem.suggestion == "stack=parallelrun"


@pytest.mark.parametrize(
    ("words", "where", "kind"),
    [
        (("model=gpt", "dp=2", "stack=nanotron"), "precision", "not_built"),
        (("model=resnet", "dp=2"), "precision", "undefined"),
        (("model=gpt", "tp=4", "layout=2d"), "layout", "not_built"),
    ],
)
def test_products_in_fp8_need_a_program_a_model_and_a_layout_that_have_them(words, where, kind):
    with pytest.raises(ConfigError) as raised:
        resolve(replace(composed(*words, "precision=fp8").config, verb="plan"))
    (problem,) = raised.value.problems
    assert problem.where == where and problem.kind == kind and "precision=bf16" in problem.suggestion


@pytest.mark.parametrize("verb", ["plan", "explain"])
@pytest.mark.parametrize("name", NAMES)
def test_every_stack_is_planned_and_differs_from_this_program(verb, name):
    config = replace(composed("model=llama3_8b", "dp=8", "precision=bf16", f"stack={name}").config, verb=verb)
    plan = resolve(config)
    assert plan.stack == config.stack and plan.stack.name == name and plan.stack.description
    own = resolve(composed("model=llama3_8b", "dp=8", "precision=bf16").config)
    assert own.stack.name == "parallelrun" and plan.stack != own.stack
    assert (plan.precision == own.precision) == (name == "torchtitan")
    assert set(presets.options("stack")) == {"parallelrun", *NAMES}
