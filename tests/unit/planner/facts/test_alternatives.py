"""The strategies of one axis side by side: each is a plan of its own, with the figures that `plan -m` shows of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from parallelrun.planner.facts.alternatives import Alternative, Alternatives, data_axis, layouts, node_counts
from parallelrun.planner.facts.document import document
from parallelrun.planner.facts.plan_facts import facts, figures
from parallelrun.planner.resolve.resolve_config import resolve
from tests.matrix import every
from tests.plans import tiny_config

DGX = {"cluster.gpus_per_node": 4, "cluster.intra_gb_s": 100.0, "cluster.inter_gb_s": 10.0, "cluster.latency_us": 5.0}
RATES = {**DGX, "cluster.peak_tflops": 1.0, "cluster.memory_gb": 40.0}
PS = {"strategy.data.kind": "ps"}
HIERARCHICAL = {"strategy.data.kind": "ring", "strategy.data.algorithm": "hierarchical"}
SPLIT = {"model.hidden": 256, "model.heads": 8, "model.seq": 16, "model.layers": 2, "global_batch": 16}


def compared(overrides: dict[str, Any]) -> Alternatives:
    config = tiny_config(overrides)
    alternatives = data_axis(resolve(config), config)
    assert alternatives is not None
    return alternatives


def split(overrides: dict[str, Any]) -> Alternatives:
    config = tiny_config({**SPLIT, **overrides})
    alternatives = layouts(resolve(config), config)
    assert alternatives is not None
    return alternatives


def by_name(alternatives: Alternatives) -> dict[str, Alternative]:
    return {strategy.name: strategy for strategy in alternatives.strategies}


SELECTED: list[tuple[dict[str, Any], str]] = [
    ({"strategy.data.kind": "ddp"}, "ddp"),
    ({"strategy.data.kind": "zero1"}, "zero1"),
    ({"strategy.data.kind": "fsdp"}, "fsdp"),
    ({"strategy.data.kind": "fsdp", "strategy.data.reshard_after_forward": False}, "fsdp reshard_after_forward=false"),
    ({"strategy.data.kind": "fsdp", "strategy.data.shard": 2}, "fsdp shard=2"),
    (HIERARCHICAL, "ring algorithm=hierarchical"),
    (PS, "ps servers=1"),
    ({**PS, "servers": 2, "consistency": "async"}, "ps servers=2 consistency=async"),
    ({"strategy.data.kind": "local_sgd", "strategy.data.sync_every": 4}, "local_sgd sync_every=4"),
    ({"strategy.data.kind": "ddp", "strategy.data.compression": "fp16"}, "ddp compression=fp16"),
]


LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("1d", {"tp": 4}),
    ("1d sequence", {"tp": 4, "strategy.tensor.sequence_parallel": True}),
    ("2d 2x2", {"tp": 4, "layout": "2d", "dp": 2}),
    ("2d 2x2 lean", {"tp": 4, "layout": "2d", "strategy.tensor.save_gathered": False}),
    ("2d 2x2 summa", {"tp": 4, "layout": "2d", "strategy.tensor.form": "summa", "pp": 2}),
    ("2d 4x2", {"tp": 8, "layout": "2d", "grid": "4x2"}),
    ("2d 2x2 stationary_w", {"tp": 4, "layout": "2d", "strategy.tensor.form": "stationary_w"}),
    ("2.5d 2x2x2", {"tp": 8, "layout": "2.5d"}),
    ("3d 2x2x2", {"tp": 8, "layout": "3d", "precision.name": "bf16"}),
    ("2d 2x2", {"tp": 4, "layout": "2d", "cp": 2}),
]
OWN = [(compared, name, {"dp": 4, **overrides}) for overrides, name in SELECTED]
OWN += [(split, name, {**SPLIT, **overrides}) for name, overrides in LAYOUTS]


@pytest.mark.parametrize(("table", "name", "overrides"), every(2, OWN))
def test_the_plans_own_strategy_is_marked_once_and_has_the_figures_of_its_plan(table, name, overrides):
    config = tiny_config({**RATES, **overrides})
    plan = resolve(config)
    own = table({**RATES, **overrides})
    assert [strategy.name for strategy in own.strategies if strategy.selected] == [own.selected.name] == [name]
    assert own.selected.here and own.selected.here.figures == figures(plan, config.cluster, facts(plan, config))
    if table is compared:
        assert (own.nodes, own.servers) == (4 + plan.servers, plan.servers)
        assert own.selected.here in own.selected.curve


@pytest.mark.parametrize(
    ("name", "overrides"),
    every(2, [
        ("zero1", {"strategy.data.kind": "zero1", "tp": 2}),
        ("fsdp", {"strategy.data.kind": "fsdp"}),
        ("ring algorithm=tree", {"strategy.data.kind": "ring", "strategy.data.algorithm": "tree"}),
        ("ring algorithm=hierarchical", HIERARCHICAL),
        ("ps servers=1", {**PS, "dp": 7, "global_batch": 14}),
        ("ps servers=half", {**PS, "dp": 4, "servers": 4, "global_batch": 8}),
        ("diloco", {"strategy.data.kind": "diloco", "tp": 2}),
    ]),
)  # fmt: skip
def test_another_strategy_is_the_plan_that_a_user_gets_who_asks_for_it(name, overrides):
    """On equal nodes and with equal samples per worker, so that servers take the places of workers."""
    tp = {key: overrides[key] for key in ("tp",) if key in overrides}
    point = by_name(compared({"dp": 8, "global_batch": 16, **RATES, **tp}))[name].here
    config = tiny_config({"dp": 8, "global_batch": 16, **RATES, **overrides})
    plan = resolve(config)
    assert point and point.servers == plan.servers and point.nodes == 8
    assert point.figures == figures(plan, config.cluster, facts(plan, config))


def test_pushes_and_pulls_follow_each_other_at_a_servers_link():
    """2 (n - 1) D/B for one server, as the table of docs/data_parallel.md says."""
    overrides = {"dp": 3, "global_batch": 6, **PS, **RATES, "cluster.gpus_per_node": 1, "cluster.latency_us": 0.0}
    config = tiny_config(overrides)
    plan = resolve(config)
    gradients = 4 * (plan.spec.num_parameters - plan.spec.num_frozen)
    assert facts(plan, config).cost.communication_s == pytest.approx(2 * 3 * gradients / 10e9, rel=0.01)


def test_without_rates_nothing_is_timed():
    alternatives = compared({"dp": 4})
    assert not alternatives.is_timed and all(s.here.step_s is None for s in alternatives.strategies if s.here)


def test_what_is_not_legal_stands_with_its_reason():
    rows = by_name(compared({"dp": 2, "sdc.every": 2}))
    assert rows["ps servers=1"].here is None and "not on parameter servers" in rows["ps servers=1"].reason


@pytest.mark.parametrize("overrides", [{"dp": 1}, {"dp": 1, "tp": 2}], ids=str)
def test_one_replica_has_nothing_to_combine(overrides):
    config = tiny_config(overrides)
    assert data_axis(resolve(config), config) is None


def test_one_server_for_one_worker_is_an_axis_of_two_nodes():
    alternatives = compared({"dp": 1, **PS})
    assert alternatives.nodes == 2 and alternatives.selected.name == "ps servers=1"


@pytest.mark.parametrize(
    ("nodes", "counts"),
    [(2, [2, 4]), (6, [2, 4, 6, 8]), (8, [2, 4, 8, 16]), (384, [32, 64, 128, 256, 384, 512])],
)
def test_numbers_of_nodes_reach_to_twice_the_plans_own(nodes, counts):
    assert node_counts(nodes) == counts


@pytest.mark.parametrize(("name", "overrides"), [LAYOUTS[0], LAYOUTS[2], LAYOUTS[4], LAYOUTS[7]])
def test_another_layout_is_the_plan_that_a_user_gets_who_asks_for_it(name, overrides):
    keys = {key: value for key, value in overrides.items() if key in ("tp", "dp", "pp")}
    config = tiny_config({**SPLIT, **RATES, **overrides})
    plan = resolve(config)
    point = by_name(split({**RATES, **keys}))[name].here
    assert point and point.figures == figures(plan, config.cluster, facts(plan, config))


def test_illegal_layouts_stand_with_their_reason_once():
    rows = by_name(split({"tp": 4}))
    assert [name for name, row in rows.items() if row.here is None] == ["2.5d", "3d"]
    assert all("tp=4" in rows[name].reason and not rows[name].selected for name in ("2.5d", "3d"))
    odd = by_name(split({"tp": 4, "global_batch": 1}))
    assert "2d 2x2 lean" not in odd and "micro_batch=1" in odd["2d 2x2"].reason


def test_nothing_is_compared_without_split_tensors():
    config = tiny_config({"dp": 2})
    assert layouts(resolve(config), config) is None


@pytest.mark.parametrize(
    ("detail", "sections"), [(None, ()), ("data_axis", ("data_axis",)), ("all", ("data_axis", "layouts"))]
)
def test_the_document_has_the_comparisons_that_detail_names(detail, sections):
    config = tiny_config({**SPLIT, "dp": 2, "tp": 4, "verb": "plan", "detail": detail})
    plain = json.loads(json.dumps(document(resolve(config), config), allow_nan=False))
    assert {name for name in ("data_axis", "layouts") if plain[name]} == set(sections)
    for name in sections:
        assert [strategy["selected"] for strategy in plain[name]["strategies"]].count(True) == 1
