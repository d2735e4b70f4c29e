"""What FSDP will do, before anything runs: its units, its traffic in closed form, and what it refuses."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from parallelrun.base.errors import ConfigError
from parallelrun.planner.predict.prediction import memory
from parallelrun.strategies.data.fsdp.units import Unit
from tests.plans import tiny_plan

FSDP = {"strategy.data.kind": "fsdp", "model.layers": 2}
REDUCED_ONCE = {"strategy__data__reduce_each_microbatch": False}
REDUCED_EACH = {"strategy.data.reduce_each_microbatch": True}


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


def rows(**overrides: Any) -> dict[tuple[str, str], tuple[int, int]]:
    plan = tiny_plan({**FSDP, **{key.replace("__", "."): value for key, value in overrides.items()}})
    found = plan.data.collectives(0, plan.mesh.coordinate(0), plan)
    return {(row.axis, row.operation): (row.calls, row.payload_bytes) for row in found}


def test_gathers_and_reductions_follow_accumulation():
    """Two blocks let go after forward: twice a microbatch; the root once a microbatch; three reductions a microbatch,
    or a step where that is asked for."""
    for microbatches in (1, 2, 4):
        found = rows(dp=2, microbatches=microbatches)
        assert found["dp", "all_gather"][0] == (2 * 2 + 1) * microbatches
        assert found["dp", "reduce_scatter"][0] == 3 * microbatches
        once = rows(dp=2, microbatches=microbatches, **REDUCED_ONCE)
        assert once["dp", "all_gather"] == found["dp", "all_gather"] and once["dp", "reduce_scatter"][0] == 3
    kept = rows(dp=2, microbatches=4, strategy__data__reshard_after_forward=False)
    assert kept["dp", "all_gather"][0] == 3


def test_bf16_halves_the_gathers_of_what_is_rounded_and_no_reduction():
    wide, narrow = rows(dp=2), rows(dp=2, precision__name="bf16")
    assert wide["dp", "reduce_scatter"] == narrow["dp", "reduce_scatter"]
    plan = tiny_plan({**FSDP, "dp": 2})
    blocks = sum(plan.spec.block(f"layers.{i}").num_parameters for i in range(2))
    assert wide["dp", "all_gather"][1] - narrow["dp", "all_gather"][1] == 2 * 2 * blocks


def test_gradients_are_sharded_unless_several_microbatches_are_reduced_at_once():
    zero_bubble = {"pp": 2, "model.layers": 4, "schedule": "zero_bubble"}
    once = {"strategy.data.reduce_each_microbatch": False}
    cases = [({}, True), ({"microbatches": 4}, True), (once, True), (once | {"microbatches": 4}, False)]
    for overrides, is_sharded in [*cases, ({"pp": 2, "microbatches": 4}, True), (zero_bubble, False)]:
        plan = tiny_plan({**FSDP, "dp": 2, **overrides})
        spec = plan.spec.parameters["layers.0.mlp.up.up.weight"]
        layout = plan.tensor.layout(spec, plan)
        assert ("dp" in plan.data.gradient_layout(spec, layout, plan).axes) == is_sharded, overrides


def test_llama3_8b_keeps_a_sixteenth_of_its_gradients_while_accumulating():
    sizes = {"model.layers": 32, "model.hidden": 4096, "model.heads": 32, "model.kv_heads": 8, "model.ffn": 14336}
    llama = {**sizes, "model.vocab": 128256, "model.bias": False, "model.norm": "rmsnorm", "model.position": "rope"}
    llama |= {"model.activation": "swiglu", "model.tied_embeddings": False, "dataset.vocab": 128256, "model.seq": 8}
    plan = tiny_plan({**FSDP, **llama, "dp": 16, "global_batch": 128, "microbatches": 8, "precision.name": "bf16"})
    assert memory(plan, 0).gradients == pytest.approx(8.03e9 * 4 / 16, rel=0.01)


def test_weights_that_are_kept_are_counted():
    one = tiny_plan({**FSDP, "dp": 2})
    kept = tiny_plan({**FSDP, "dp": 2, "strategy.data.reshard_after_forward": False})
    assert kept.data.gathered_bytes(0, one.mesh.coordinate(0), kept) == 4 * one.spec.num_parameters


@pytest.mark.parametrize(
    "overrides, what, suggestion",
    [
        ({"dp": 4, "strategy.data.shard": 3}, "does not divide dp=4", "strategy.data.shard=2"),
        ({"dp": 4, "strategy.data.shard": 8}, "does not divide dp=4", "strategy.data.shard=4"),
        ({"dp": 4, "strategy.data.shard": 1}, "splits nothing", "ddp"),
        (
            {
                "dp": 2,
                "pp": 2,
                "model.layers": 4,
                "strategy.pipeline.kind": "zero_bubble",
                "strategy.data.reshard_after_forward": True,
            },
            "reshard_after_forward=true under schedule=zero_bubble",
            "reshard_after_forward=false",
        ),
        (
            {"dp": 2, "pp": 2, "model.layers": 4, "strategy.pipeline.kind": "zbv", **REDUCED_EACH},
            "reduce_each_microbatch=true under schedule=zbv",
            "reduce_each_microbatch=false",
        ),
    ],
    ids=["uneven", "too many", "one", "zero bubble", "zbv"],
)
def test_what_cannot_be_is_refused_with_the_nearest_that_can(overrides, what, suggestion):
    with pytest.raises(ConfigError) as caught:
        tiny_plan({**FSDP, **overrides})
    (problem,) = caught.value.problems
    assert what in problem.what
    assert suggestion in problem.suggestion


def test_a_tensor_rank_without_rows_of_the_vocabulary_is_refused():
    empty = {**FSDP, "dp": 2, "tp": 4, "model.vocab": 5, "dataset.vocab": 5}
    with pytest.raises(ConfigError) as caught:
        tiny_plan(empty)
    (problem,) = caught.value.problems
    assert problem.kind == "not_built" and "strategy.data.kind=zero1" in problem.suggestion
    assert tiny_plan({**empty, "strategy.data.kind": "zero1"})
    assert tiny_plan({**empty, "model.vocab": 7, "dataset.vocab": 7}), "two, two, two and one"


def test_a_step_of_one_microbatch_ends_with_its_part_of_all_gradients():
    plan = tiny_plan({"dp": 2, "strategy.data.kind": "fsdp", "micro_batch": 4})
    assert plan.batch.microbatches == 1
    assert plan.data.ending_bytes(0, plan.mesh.coordinate(0), plan) == 4 * plan.spec.num_parameters // 2
