"""What the grid tensor strategies send: with frozen layers, and against every single rank."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parallelrun.config.schema.cluster_schema import ClusterConfig
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.model.model_spec import LayerSpec
from parallelrun.planner.pieces.hosts import stays_in_node
from parallelrun.planner.predict import prediction
from parallelrun.planner.predict.traffic import traffic_of
from tests.plans import tiny_plan

FLAT = {"layout": "2d", "tp": 4, "model.layers": 1, "strategy.tensor.form": "stationary_y"}


def rows_of(plan: Plan) -> dict[tuple[str, str, str], tuple[int, int]]:
    """By axis, operation and purpose: (calls, bytes) of the tensor strategy in one step."""
    rows = plan.tensor.collectives(plan.spec.blocks, plan)
    return {(row.axis, row.operation, row.purpose): (row.calls, row.payload_bytes) for row in rows}


def frozen(plan: Plan, *layers: str) -> Plan:
    """The plan with the parameters of those layers frozen."""

    def freeze(layer: LayerSpec) -> LayerSpec:
        return replace(layer, parameters=tuple(replace(p, frozen=True) for p in layer.parameters))

    blocks = tuple(
        replace(block, layers=tuple(freeze(x) if x.name.startswith(layers) else x for x in block.layers))
        for block in plan.spec.blocks
    )
    return replace(plan, spec=replace(plan.spec, blocks=blocks))


def test_what_is_frozen_reduces_no_gradient_and_nothing_goes_back_through_what_comes_first():
    plan = tiny_plan(FLAT | {"model.tied_embeddings": False})
    whole = rows_of(plan)
    middle = rows_of(frozen(plan, "layers.0.mlp"))
    assert (
        whole["row", "reduce_scatter", "weight_gradients"][0] - 2
        == middle["row", "reduce_scatter", "weight_gradients"][0]
    )
    assert {key: row for key, row in whole.items() if key[2] != "weight_gradients"} == {
        key: row for key, row in middle.items() if key[2] != "weight_gradients"
    }
    last = rows_of(frozen(plan, "embedding", "layers", "head.norm"))
    assert last["row", "reduce_scatter", "weight_gradients"][0] == 1
    assert last["col", "reduce_scatter", "activations"][0] == 1  # the table's rows, forward
    assert ("col", "all_reduce", "norm") not in last and last["col", "all_gather", "activations"][0] == 5


# Against every rank ---------------------------------------------------------------------------------------------------

LAYOUTS: list[dict[str, Any]] = [
    {"layout": "2d", "tp": 4},
    {"layout": "2d", "tp": 4, "grid": "1x4"},
    {"layout": "2d", "tp": 8, "grid": "4x2"},
    {"layout": "2.5d", "tp": 8, "depth": 2},
    {"layout": "3d", "tp": 8},
]
COMMON: dict[str, Any] = {"deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True}


@st.composite
def grids(draw) -> dict[str, Any]:
    """Legal plans on a grid, the vocabulary of any size: nested uneven or empty parts."""
    dp = draw(st.sampled_from([1, 1, 2, 3]))
    return {
        **draw(st.sampled_from(LAYOUTS)),
        "dp": dp,
        "pp": draw(st.sampled_from([1, 2])),
        "global_batch": 16 * dp,
        "microbatches": 2,
        "model.layers": 2,
        "model.vocab": draw(st.integers(32, 60)),
        "model.tied_embeddings": draw(st.booleans()),
        "strategy.data.kind": draw(st.sampled_from(["ddp", "zero1"])),
        "strategy.tensor.save_gathered": draw(st.booleans()),
    }


@settings(max_examples=20, **COMMON)
@given(grids())
def test_totals_and_memory_are_those_of_every_rank(overrides):
    plan = tiny_plan(overrides)
    every = [prediction.collectives(plan, rank) for rank in range(plan.world)]
    sums: Counter[tuple[str, str, str]] = Counter()
    for row in (row for rows in every for row in rows):
        sums[row.axis, row.operation, row.purpose] += row.payload_bytes
    busiest, table = traffic_of(plan)
    assert {(row.axis, row.operation, row.purpose): row.total_payload_bytes for row in table} == dict(sums)
    sends = [sum(prediction.wire_bytes(row, prediction.group_size(plan, row.axis)) for row in rows) for rows in every]
    assert sends[busiest] == max(sends)
    for pp_rank, memory in prediction.memories(plan).items():
        mine = [rank for rank in range(plan.world) if plan.mesh.coordinate(rank)["pp"] == pp_rank]
        assert memory.total == max(prediction.memory(plan, rank).total for rank in mine)


@settings(max_examples=40, **COMMON)
@given(grids(), st.integers(1, 24))
def test_an_axis_stays_inside_a_host_if_each_of_its_groups_does(overrides, per_node):
    plan = tiny_plan(overrides)
    cluster = ClusterConfig(gpus_per_node=per_node)
    for axis in (*plan.mesh.mesh_dims_of("tp"), "tp", "dp"):
        inside = all(len({rank // per_node for rank in group}) == 1 for group in plan.mesh.groups(axis))
        assert stays_in_node(plan, cluster, axis) <= inside, axis
        if plan.world % per_node == 0 and axis != "dp":
            assert stays_in_node(plan, cluster, axis) == inside, axis
