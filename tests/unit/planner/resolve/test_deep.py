"""Deep models: blocks that are alike are described, cut and counted together, and sizes have limits."""

from __future__ import annotations

import sys
import time
from collections import Counter
from dataclasses import replace

import pytest

from parallelrun.base.errors import ConfigError
from parallelrun.config.schema.run_schema import Config
from parallelrun.models.gpt import spec as gpt
from parallelrun.planner.contract.parameters import distinct_parameters, held_parameters, module_layout
from parallelrun.planner.facts.plan_facts import facts
from parallelrun.planner.pieces.partition import partition
from parallelrun.planner.predict import prediction
from parallelrun.planner.resolve.resolve_config import resolve
from tests.plans import tiny_config

LAYERS = 10_000


@pytest.mark.parametrize(
    ("layers", "seconds", "overrides"),
    [
        (2000, 3, {}),  # 0.3 s on an idle core, where every layer by itself took 5
        (1000, 3, {"strategy.data.kind": "fsdp", "dp": 4}),
        (1000, 3, {"tp": 2, "pp": 8}),
    ],
)
def test_thousands_of_layers_are_planned_in_seconds(layers, seconds, overrides):
    config = tiny_config({"model.layers": layers, "model.seq": 64, **overrides})
    begun = time.process_time()
    facts(resolve(config), config)
    assert time.process_time() - begun < seconds


def test_a_block_named_again_is_the_block_made_for_its_place():
    config = Config()
    config.model = replace(config.model, layers=7, experts=4, expert_period=3, dense_layers=1, shared_experts=1)
    spec = gpt.MODEL.make(config, 256)
    assert spec.blocks[1:-1] == tuple(gpt._block(f"layers.{index}", index, config.model) for index in range(7))


@pytest.mark.parametrize("overrides", [{}, {"pp": 3}, {"pp": 2, "strategy.pipeline.kind": "interleaved", "tp": 2}])
def test_blocks_that_are_alike_are_counted_and_not_listed(overrides):
    config = tiny_config({"model.layers": 12, **overrides})
    plan = resolve(config)
    for pp_rank in range(plan.mesh.size("pp")):
        held = held_parameters(plan, pp_rank)
        assert [p.layout for p in held] == [module_layout(p.spec, plan) for p in held]
        listed = Counter((p.spec.shape, p.spec.layer_role, p.layout, p.shared, p.stage) for p in held)
        counted: Counter[object] = Counter()
        for p, count in distinct_parameters(plan, pp_rank):
            counted[p.spec.shape, p.spec.layer_role, p.layout, p.shared, p.stage] += count
        assert counted == listed
        assert len(distinct_parameters(plan, pp_rank)) < len(held)


def test_every_block_is_alike_to_one_that_costs_the_same():
    plan = resolve(tiny_config({"model.layers": 6}))
    alike = plan.spec.first_alike
    assert len(set(alike.values())) == 3 and alike["layers.5"] == "layers.0" != alike["embedding"]
    assert prediction.memory(plan, 0).weights == 4 * plan.spec.num_parameters


@pytest.mark.parametrize("num_stages", [2, 64, 256, 9_999])
def test_many_layers_are_cut_at_once(num_stages):
    begun = time.process_time()
    sizes = partition([0.0, *[1.25] * LAYERS, 7.5], num_stages)
    assert sum(sizes) == LAYERS + 2 and len(sizes) == num_stages
    assert time.process_time() - begun < 2


def test_the_limit_is_suggested_without_planning_with_it(monkeypatch):
    def planned(*_):
        raise AssertionError("a plan with the largest number that is allowed takes seconds")

    monkeypatch.setattr(sys.modules[resolve.__module__], "spec_of", planned)
    with pytest.raises(ConfigError) as caught:
        resolve(tiny_config({"model.layers": 2**63}))
    assert [problem.suggestion for problem in caught.value.problems] == ["model.layers=10000"]


def test_a_schedule_has_a_limit_that_is_told():
    with pytest.raises(
        ConfigError, match="512 stages x 4096 microbatches are more than can be planned: at most 524288"
    ):
        resolve(tiny_config({"model.layers": 512, "pp": 512, "global_batch": 4096, "micro_batch": 1}))
