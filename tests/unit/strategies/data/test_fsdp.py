"""The units of FSDP, before anything runs. `tests/ranks` counts what is sent and measures the memory."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from parallelrun.strategies.data.fsdp.units import Unit
from tests.plans import tiny_plan

FSDP = {"strategy.data.kind": "fsdp", "model.layers": 2}


def summary(pp_rank: int = 0, **overrides: Any) -> list[tuple[str, str, bool, bool]]:
    plan = tiny_plan({**FSDP, **{key.replace("__", "."): value for key, value in overrides.items()}})
    return [(unit.kind, unit.block, unit.reshard, unit.rounded) for unit in plan.data.units(plan, pp_rank)]


def test_blocks_that_share_a_tied_weight_are_one_unit():
    """FSDP would take the second holder for a parameter of its own, and silently untie it."""
    found = summary(dp=2)
    assert found == [("block", "layers.0", True, True), ("block", "layers.1", True, True), ("root", "", False, False)]


def test_untied_blocks_are_their_own_units_and_the_last_is_kept_for_its_backward():
    found = summary(dp=2, model__tied_embeddings=False)
    assert [(block, reshard) for _, block, reshard, _ in found] == [
        ("embedding", True),
        ("layers.0", True),
        ("layers.1", True),
        ("head", False),
    ]


def test_an_embedding_travels_as_stored_and_layers_that_round_in_the_compute_dtype():
    found = {block: rounded for _, block, _, rounded in summary(dp=2, model__tied_embeddings=False)}
    assert found == {"embedding": False, "layers.0": True, "layers.1": True, "head": True}


def test_under_pipelining_nothing_is_let_go_unless_asked():
    assert not any(reshard for *_, reshard, _ in summary(dp=2, pp=2))
    assert all(reshard for *_, reshard, _ in summary(dp=2, pp=2, strategy__data__reshard_after_forward=True))


@pytest.mark.parametrize(
    "overrides",
    [
        {"dp": 2}, {"dp": 2, "model.tied_embeddings": False}, {"dp": 2, "model.preset": "mlp"}, {"dp": 2, "pp": 2},
        {"dp": 2, "pp": 2, "strategy.pipeline.kind": "zbv"}, {"dp": 4, "strategy.data.shard": 2},
    ],
)  # fmt: skip
def test_counted_units_are_all_units(overrides):
    plan = tiny_plan({**FSDP, "model.layers": 12, **overrides})
    for pp_rank in range(plan.mesh.size("pp")):
        every, counted = plan.data.units(plan, pp_rank), plan.data.counted_units(plan, pp_rank)
        found = {kind_of(unit): 0 for unit, _ in counted}
        for unit, count in counted:
            found[kind_of(unit)] += count
        assert found == Counter(kind_of(unit) for unit in every)
        assert len(counted) < len(every)


def kind_of(unit: Unit) -> tuple[Any, ...]:
    sizes = tuple((held.spec.shape, held.layout) for held in unit.parameters)
    return unit.kind, unit.stage, unit.reshard, unit.axis, unit.rounded, sizes


def test_a_weight_of_two_stages_on_one_rank_is_a_unit_of_its_own():
    found = summary(dp=2, pp=2, strategy__pipeline__kind="zbv", model__layers=4)
    assert [kind for kind, *_ in found].count("tied") == 1
    plan = tiny_plan({**FSDP, "dp": 2, "pp": 2, "strategy.pipeline.kind": "zbv", "model.layers": 4})
    names = [p.name for unit in plan.data.units(plan, 0) for p in unit.parameters]
    assert sorted(names) == sorted(set(names))


def test_gradients_are_sharded_unless_several_microbatches_are_reduced_at_once():
    zero_bubble = {"pp": 2, "model.layers": 4, "schedule": "zero_bubble"}
    once = {"strategy.data.reduce_each_microbatch": False}
    each = zero_bubble | {"strategy.data.reduce_each_microbatch": True}
    cases = [({}, True), ({"microbatches": 4}, True), (once, True), (once | {"microbatches": 4}, False)]
    for overrides, is_sharded in [*cases, ({"pp": 2, "microbatches": 4}, True), (zero_bubble, False), (each, True)]:
        plan = tiny_plan({**FSDP, "dp": 2, **overrides})
        spec = plan.spec.parameters["layers.0.mlp.up.up.weight"]
        layout = plan.tensor.layout(spec, plan)
        assert ("dp" in plan.data.gradient_layout(spec, layout, plan).axes) == is_sharded, overrides
