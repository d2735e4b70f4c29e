"""What the grid tensor strategies send: against the papers and against every single rank."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parallelrun.config.schema.cluster_schema import ClusterConfig
from parallelrun.planner.contract.plan import Collective, Plan
from parallelrun.planner.model.model_spec import LayerSpec
from parallelrun.planner.pieces.hosts import stays_in_node
from parallelrun.planner.predict import prediction
from parallelrun.planner.predict.traffic import traffic_of
from tests.plans import tiny_plan

FLAT = {"layout": "2d", "tp": 4, "model.layers": 1, "strategy.tensor.form": "stationary_y"}
LEAN = {"strategy.tensor.save_gathered": False}
APART = {"strategy.tensor.overlap": False}


def sent(overrides: dict[str, Any]) -> dict[tuple[str, str, str], tuple[int, int]]:
    """By axis, operation and purpose: (calls, bytes) of the tensor strategy in one step."""
    return by_key(tensor_rows(tiny_plan(overrides)))


def tensor_rows(plan: Plan) -> list[Collective]:
    return plan.tensor.collectives(plan.spec.blocks, plan)


def by_key(rows: list[Collective]) -> dict[tuple[str, str, str], tuple[int, int]]:
    return {(row.axis, row.operation, row.purpose): (row.calls, row.payload_bytes) for row in rows}


def test_gathering_again_does_not_depend_on_overlap():
    assert sent(FLAT | LEAN | APART) == sent(FLAT | LEAN)


def test_operands_move_in_the_compute_dtype_and_weight_gradients_in_theirs():
    rounded = sent(FLAT | {"precision.name": "bf16"})
    for key, (calls, payload) in sent(FLAT).items():
        halved = key[2] in ("activations", "weights")
        assert rounded[key] == (calls, payload // 2 if halved else payload), key


@pytest.mark.parametrize(("more", "again"), [({}, 2), (APART, 1), (APART | {"dropout": 0.1}, 2)], ids=str)
def test_the_last_scatter_is_sent_again_only_if_something_behind_it_is_needed(more, again):
    """Of the layer's two scatters of Y; a node of its own stands behind the last tensor that backward needs."""
    scatters = {**FLAT, "strategy.tensor.form": "stationary_x", **more}
    calls = [sent({**scatters, "recompute": mode})["col", "reduce_scatter", "activations"][0] for mode in MODES]
    assert calls[1] - calls[0] == 2 + again  # q k v and up scatter too


MODES = ("none", "full")


def test_one_axis_of_one_rank_is_silent():
    assert {row.axis for row in tensor_rows(tiny_plan(FLAT | {"grid": "1x4"}))} == {"col"}
    assert {row.axis for row in tensor_rows(tiny_plan(FLAT | {"grid": "4x1"}))} == {"row"}


def test_the_model_s_own_input_has_no_gradient():
    """An mlp begins with a norm of the features, the matmul lesson with the product itself."""
    mlp = {"model.name": "mlp", "model.layers": 2, "model.hidden": 16, "layout": "2d", "tp": 4}
    found = sent(mlp)
    assert found["col", "all_gather", "norm"][0] - found["col", "all_reduce", "norm"][0] == 1
    lesson = {"model.name": "matmul", "model.inner": 8, "layout": "2d", "tp": 4}
    found = sent(lesson | {"strategy.tensor.form": "stationary_y"})
    assert found["col", "all_gather", "activations"][0] == 1
    assert ("col", "reduce_scatter", "activations") not in found


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
    whole = by_key(tensor_rows(plan))
    middle = by_key(tensor_rows(frozen(plan, "layers.0.mlp")))
    assert (
        whole["row", "reduce_scatter", "weight_gradients"][0] - 2
        == middle["row", "reduce_scatter", "weight_gradients"][0]
    )
    assert {key: row for key, row in whole.items() if key[2] != "weight_gradients"} == {
        key: row for key, row in middle.items() if key[2] != "weight_gradients"
    }
    last = by_key(tensor_rows(frozen(plan, "embedding", "layers", "head.norm")))
    assert last["row", "reduce_scatter", "weight_gradients"][0] == 1
    assert last["col", "reduce_scatter", "activations"][0] == 1  # the table's rows, forward
    assert ("col", "all_reduce", "norm") not in last and last["col", "all_gather", "activations"][0] == 5


def received(plan: Plan, sizes: dict[str, int]) -> int:
    """Bytes of the products of the one transformer layer."""
    short = replace(plan, recompute="none")
    rows = plan.tensor.collectives((plan.spec.block("layers.0"),), short)
    return sum(prediction.wire_bytes(row, sizes[row.axis]) for row in rows if row.purpose != "norm")


M, H = 8 * 8, 16  # positions and hidden of the tiny model
C = (2 - 1) / 2**2


@pytest.mark.parametrize(
    ("overrides", "elements"),
    [  # the reference's table, per transformer layer, forward and backward
        (FLAT | {"strategy.tensor.form": "summa"}, 3 * C * (7 * M * H + 12 * H**2)),
        (FLAT, 2 * C * (7 * M * H + 12 * H**2)),
        (FLAT | LEAN, 3 * C * (7 * M * H + 12 * H**2)),
        (FLAT | {"strategy.tensor.form": "auto"}, 2 * C * (4 * M * H + 12 * H**2)),
        (FLAT | {"layout": "2.5d", "tp": 8, "depth": 2}, 2 * C * (7 * M * H / 2 + 12 * H**2)),
        ({"model.layers": 1, "layout": "3d", "tp": 8}, 2 * (2 - 1) / 2**3 * (16 * M * H + 12 * H**2)),
    ],
    ids=["summa", "stationary y", "lean", "best", "2.5d", "3d"],
)
def test_a_layer_s_volume_is_that_of_the_papers(overrides, elements):
    plan = tiny_plan(overrides)
    assert received(plan, plan.mesh.sizes) == 4 * elements


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
