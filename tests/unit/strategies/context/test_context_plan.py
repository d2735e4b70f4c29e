"""Context parallelism before a run: mesh, checks, order, traffic."""

from __future__ import annotations

from typing import Any

import pytest

from parallelrun.base.errors import ConfigError
from tests.plans import pairs, tiny_config, tiny_plan

KIND, ORDER, ULYSSES = "strategy.context.kind", "strategy.context.order", "strategy.context.ulysses"


def problems(overrides: dict[str, Any], given: frozenset[str] = frozenset()) -> list[tuple[str, str, str]]:
    from parallelrun.planner.resolve.resolve_config import resolve

    with pytest.raises(ConfigError) as caught:
        resolve(tiny_config(overrides), given=given)
    return [(problem.what, problem.suggestion, problem.kind) for problem in caught.value.problems]


def test_the_mesh_has_cp_between_dp_and_tp_and_one_axis_for_both():
    plan = tiny_plan(pp=2, dp=2, cp=2, tp=2, schedule="gpipe")
    assert plan.mesh.mesh_dims == (("pp", 2), ("dp", 2), ("cp", 2), ("tp", 2))
    assert (plan.data_axis, plan.num_data_ranks, plan.world, plan.seq) == ("dp_cp", 4, 16, 4)
    assert plan.mesh.group_of(0, "dp_cp") == (0, 2, 4, 6)
    assert plan.batch.global_batch == 2 * plan.batch.replica_batch  # samples are divided over dp alone
    assert tiny_plan(dp=2).data_axis == "dp"


def test_experts_may_be_spread_over_cp():
    options = {"model.experts": 8, "model.router.aux_coefficient": 0.0, "strategy.expert.kind": "dropless"}
    plan = tiny_plan({**options, "ep": 4, "dp": 2, "cp": 2})
    assert plan.mesh.group_of(0, "ep") == (0, 1, 2, 3)
    plan = tiny_plan({**options, "ep": 2, "dp": 2, "cp": 4, "model.seq": 16})
    assert plan.mesh.group_of(0, "ep") == (0, 1)
    assert plan.mesh.group_of(0, "expert_dp") == (0, 2, 4, 6)
    assert tiny_plan({**options, "ep": 4, "dp": None, "cp": 2}).degrees["dp"] == 2  # filled


def test_cp_takes_part_in_the_world():
    assert tiny_plan(world=8, dp=None, cp=2, tp=2).degrees["dp"] == 2
    (found,) = problems({"world": 8, "dp": 1, "cp": 3, "tp": 2})
    assert "cp 3" in found[0] and "cp=4" in found[1]


@pytest.mark.parametrize(
    "changed, said",
    [
        ({"cp": 3}, "model.seq=8 does not divide into 2 x cp=3 parts (order=zigzag)"),
        ({"cp": 8}, "model.seq=8 does not divide into 2 x cp=8 parts (order=zigzag)"),
        ({"cp": 3, ORDER: "striped"}, "model.seq=8 does not divide into cp=3"),
        ({"cp": 2, "tp": 4, "model.seq": 4, "strategy.tensor.sequence_parallel": True}, "of tp=4 slices each"),
        ({"cp": 8, KIND: "ulysses"}, "model.heads=4 is not divisible by 8 ranks"),
        ({"cp": 2, "tp": 4, KIND: "ulysses"}, "model.heads=4 is not divisible by tp=4 x 2 ranks"),
        ({"cp": 2, KIND: "ulysses", "model.heads": 6, "model.hidden": 24, "model.kv_heads": 3}, "model.kv_heads=3"),
        ({"cp": 4, KIND: "usp", ULYSSES: 3}, "strategy.context.ulysses=3 does not divide cp=4"),
        ({"cp": 2, "model.name": "mlp", "dataset.name": "digits"}, "no attention"),
        (
            {"cp": 4, "tp": 4, "layout": "2d", KIND: "ulysses"},
            "heads=4 is not divisible by 2 parts (layout=2d) x 4 ranks",
        ),
    ],
)
def test_what_is_refused_says_why_and_what_to_type(changed, said):
    found = problems(changed)
    assert any(said in what for what, _, _ in found), found
    assert all(suggestion for _, suggestion, _ in found)
    for what, suggestion, kind in found:
        for key, value in pairs(suggestion) if kind == "arithmetic" and "seq" in what else ():
            fixed = {**changed, key: int(value)}
            assert tiny_plan(fixed).context is not None  # what is suggested is legal


@pytest.mark.parametrize(
    "changed, key",
    [
        ({"cp": 3, KIND: "ulysses"}, "cp"),
        ({"cp": 6, KIND: "usp", ULYSSES: 3, "model.seq": 12}, ULYSSES),
        ({"cp": 4, "tp": 4, "layout": "2d", KIND: "ulysses"}, "cp"),
        ({"cp": 8, KIND: "ulysses", "model.seq": 24, "model.heads": 6, "model.hidden": 24, "model.kv_heads": 3}, "cp"),
    ],
)
def test_the_nearest_numbers_of_ranks_that_divide_the_heads_are_legal(changed, key):
    (suggestion,) = (fix for what, fix, _ in problems(changed) if "heads=" in what)
    asked = [int(value) for name, value in pairs(suggestion) if name == key]
    assert asked
    for value in asked:
        assert tiny_plan({**changed, key: value}).context is not None


@pytest.mark.parametrize(
    "overrides, key",
    [({}, ORDER), ({"cp": 2, KIND: "ulysses"}, ORDER), ({"cp": 2}, ULYSSES), ({}, KIND)],
)
def test_a_key_that_is_not_read_is_refused(overrides, key):
    value = {ORDER: "striped", ULYSSES: 2, KIND: "usp"}[key]
    (found,) = problems({**overrides, key: value}, frozenset({key}))
    assert f"{key}={value} is read by none" in found[0]


def test_the_order_is_chosen_by_the_mask():
    assert tiny_plan(cp=2).context.order == "zigzag"
    assert tiny_plan({"cp": 2, KIND: "ulysses"}).context.order == "contiguous"
    bert = tiny_plan({"cp": 2, "model.name": "bert", "dataset.name": "synthetic"})
    assert bert.context.order == "contiguous" and bert.context.imbalance(bert, None) == 1
    packed = tiny_plan({"cp": 2, "model.name": "bert", "dataset.pack": True})
    assert packed.context.order == tiny_plan({"cp": 2, "dataset.pack": True}).context.order == "striped"
    assert any("every packed document" in sentence for sentence in packed.filled)


def test_usp_takes_the_most_ranks_that_divide_the_heads():
    plan = tiny_plan({"cp": 8, KIND: "usp", "model.seq": 64, "tp": 2})
    assert plan.context.head_ranks == 2 and plan.context.axes(plan) == ("cp_ring", "cp_heads")
    assert any("ulysses=2 (filled" in sentence for sentence in plan.filled)
    held = [plan.context.spans(index, plan) for index in range(8)]
    positions = sorted(span.start + i * span.step for one in held for span in one for i in range(span.length))
    assert positions == list(range(64))
    whole = plan.context.attended_spans(1, plan)
    assert sum(span.length for span in held[2] + held[3]) == sum(span.length for span in whole) == 16
    assert [min(s.start for s in one) for one in (held[2], held[3])] == [span.start for span in whole]
