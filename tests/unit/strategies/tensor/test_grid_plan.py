"""The grid tensor strategies (2d, 2.5d, 3d) before a process exists: grids, forms, layouts, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parallelrun.base.errors import EXIT_CONFIG, ConfigError
from parallelrun.base.layout import Layout
from parallelrun.config.schema.strategy_keys import narrowed
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.contract.request import Request
from parallelrun.planner.model.product import ActivationLayout, num_panels
from parallelrun.planner.resolve.freeze import freeze, load_frozen
from parallelrun.planner.resolve.resolve_config import resolve
from parallelrun.planner.resolve.shorthands import fold
from parallelrun.strategies.tensor.grid import forms as grid_forms
from parallelrun.strategies.tensor.grid import shape as grid_shape
from parallelrun.strategies.tensor.grid.plan import GridStrategy, Tensor2D, Tensor3D, Tensor25D
from tests.matrix import examples
from tests.plans import pairs, tiny_config, tiny_plan
from tests.unit.planner.contract.test_properties import cover

NINE = {"layout": "2d", "tp": 9, "model.hidden": 18, "model.heads": 9, "model.ffn": 36, "global_batch": 9}
TWO_BY_THREE = {"layout": "2d", "tp": 6, "grid": "2x3", "model.hidden": 24, "model.heads": 12, "global_batch": 12}
SQUARE = {"layout": "2d", "tp": 4}
DEEP = {"layout": "2.5d", "tp": 8}
CUBE = {"layout": "3d", "tp": 8}
STRATEGIES = {"2d": Tensor2D, "2.5d": Tensor25D, "3d": Tensor3D}
CELLS = {"2d 4": SQUARE, "2d 9": NINE, "2d 2x3": TWO_BY_THREE, "2.5d 8": DEEP, "3d 8": CUBE}


def problems_of(overrides, /, given=frozenset(), **more):
    with pytest.raises(ConfigError) as caught:
        resolve(tiny_config(overrides), given=given, **more)
    assert caught.value.exit_code == EXIT_CONFIG
    return caught.value.problems


def only_problem(overrides, /, **more):
    (problem,) = problems_of(overrides, **more)
    return problem


def layout_of(plan: Plan, name: str) -> Layout:
    return plan.tensor.layout(plan.spec.parameters[name], plan)


def arrange(kind, tp, grid, depth):
    return grid_shape.arrange(kind, tp, grid, depth)


def grid_of(plan: Plan) -> GridStrategy:
    assert isinstance(plan.tensor, GridStrategy)
    return plan.tensor


def layer(plan: Plan, name: str):
    return next(layer for layer in plan.spec.layers() if layer.name == name)


# Axes


def test_the_last_axis_varies_fastest_so_that_a_row_of_the_grid_lies_together():
    mesh = tiny_plan(TWO_BY_THREE).mesh
    assert mesh.mesh_dims == (("pp", 1), ("dp", 1), ("row", 2), ("col", 3))
    assert mesh.group_of(4, "col") == (3, 4, 5) and mesh.group_of(4, "row") == (1, 4)
    assert mesh.group_of(4, "tp") == tuple(range(6))


def test_depth_is_the_slowest_axis_and_its_grids_are_whole():
    mesh = tiny_plan(DEEP, dp=2, global_batch=16).mesh
    assert mesh.group_of(13, "depth") == (9, 13) and mesh.coordinate(13) | {
        "depth": 1,
        "row": 0,
        "col": 1,
    } == mesh.coordinate(13)


def test_a_depth_of_one_is_2d():
    flat, deep = tiny_plan(layout="2d", tp=4), tiny_plan(layout="2.5d", tp=4, depth=1)
    assert deep.mesh == flat.mesh and deep.tensor.forms == flat.tensor.forms
    for parameter in flat.spec.parameters:
        assert layout_of(flat, parameter) == layout_of(deep, parameter)


# What the shorthands say


def test_an_explicit_layout_beats_ptdp_but_contradicts_a_preset_that_is_another_layout():
    assert tiny_plan(layout="2d", tp=4).tensor.kind == "2d"
    own = {"strategy.own_axis": "tp", "strategy.name": "tp2d", "strategy.tensor.kind": "2d", "tp": 4}
    problem = only_problem({**own, "layout": "1d"})
    assert problem.kind == "contradiction" and problem.where == "layout" and "layout=2d" in problem.suggestion
    assert tiny_plan({**own, "layout": "2d"}).tensor.kind == "2d"


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ({"tp": 4, "grid": "2x2"}, "grid"),
        ({"tp": 4, "depth": 1}, "depth"),
        ({"layout": "2d", "tp": 4, "depth": 1}, "depth"),
        ({**CUBE, "grid": "2x4"}, "grid"),
        ({"tp": 4, "strategy.tensor.form": "summa"}, "strategy.tensor.form"),
        ({**CUBE, "strategy.tensor.form": "summa"}, "strategy.tensor.form"),
        ({"tp": 4, "strategy.tensor.save_gathered": False}, "strategy.tensor.save_gathered"),
        ({**CUBE, "strategy.tensor.sequence_parallel": True}, "strategy.tensor.sequence_parallel"),
    ],
)
def test_keys_that_the_layout_does_not_read_are_refused_and_only_noted_in_a_sweep(overrides, key):
    problem = only_problem(overrides, given=frozenset(overrides))
    assert problem.kind == "unread" and problem.where == key
    plan = resolve(tiny_config(overrides), given=frozenset(overrides), sweep=True)
    assert any(key in warning for warning in plan.warnings)


def test_two_different_grids_are_a_contradiction():
    overrides = {**TWO_BY_THREE, "strategy.tensor.grid": "3x2"}
    assert only_problem(overrides, given=frozenset(overrides)).kind == "contradiction"


@pytest.mark.parametrize("cell", [*CELLS, "2.5d alone", "2d world"])
def test_a_frozen_plan_resolves_to_the_same_plan_with_its_grid_as_numbers(cell):
    more = {
        "2.5d alone": {"layout": "2.5d", "tp": 16, "global_batch": 16},
        "2d world": {"strategy.own_axis": "tp", "strategy.tensor.kind": "2d", "tp": None, "world": 4},
    }
    config = tiny_config(CELLS.get(cell) or more[cell])
    plan = resolve(config)
    frozen = load_frozen(freeze(config, plan))
    again = resolve(frozen)
    assert (again.mesh, again.tensor, again.batch) == (plan.mesh, plan.tensor, plan.batch)
    assert frozen.layout is None and frozen.grid is None and frozen.depth is None
    if plan.tensor.kind != "3d":
        assert frozen.strategy.tensor.grid == f"{plan.mesh.size('row')}x{plan.mesh.size('col')}"
    assert frozen.strategy.tensor.depth == (plan.mesh.size("depth") if plan.tensor.kind == "2.5d" else None)


# What is refused, each with values that are legal (see also the property below)


@pytest.mark.parametrize(
    ("overrides", "where", "told", "suggested"),
    [
        ({"layout": "2d", "tp": 8}, "tp", "which needs a square tp", {"tp=4", "tp=16", "grid=2x4"}),
        ({"layout": "2d", "tp": 8, "grid": "2x3"}, "grid", "tp=8 with grid=2x3 (6 ranks)", {"grid=2x4"}),
        ({"layout": "2d", "tp": 8, "grid": "2by4"}, "grid", "rows x columns", {"grid=2x4"}),
        ({"layout": "2.5d", "tp": 12}, "tp", "depth at most rows and columns", {"tp=8", "tp=16"}),
        ({"layout": "2.5d", "tp": 16, "depth": 4}, "depth", "tp=16 with depth=4", {"depth=1"}),
        ({"layout": "2.5d", "tp": 8, "depth": 3}, "depth", "tp=8 with depth=3", {"depth=2"}),
        ({"layout": "2.5d", "tp": 8, "depth": 1}, "depth", "square", {"depth=2", "grid=2x4", "tp=4", "tp=16"}),
        ({"layout": "2.5d", "tp": 8, "depth": 2, "grid": "1x4"}, "grid", "depth=2", {"grid=2x2"}),
        ({"layout": "2.5d", "tp": 24, "depth": 2, "grid": "2x2"}, "grid", "grid=2x2 (4 ranks) and depth=2", {"tp=8"}),
        ({"layout": "2.5d", "tp": 16, "grid": "2x2"}, "grid", "depth at most", {"tp=4", "tp=8", "grid=4x4"}),
        ({"layout": "3d", "tp": 9}, "tp", "needs a cube of ranks", {"tp=8"}),
        ({"layout": "2d", "tp": 1, "grid": "2x3"}, "grid", "tp=1 with grid=2x3", {"grid=1x1"}),
        # heads and widths must divide by the axes that split them
        ({**SQUARE, "model.heads": 1}, "tp", "model.heads=1", {"model.heads=2", "model.heads=4", "tp=1"}),
        ({**SQUARE, "model.ffn": 31}, "tp", "model.ffn=31", {"model.ffn=30", "model.ffn=32", "tp=1"}),
        (
            {**CUBE, "model.ffn": 30}, "tp", "model.ffn=30 is not divisible by 4",
            {"model.ffn=28", "model.ffn=32", "tp=1"},
        ),
        # only whole samples are split, so the microbatch must divide
        ({**SQUARE, "micro_batch": 1}, "micro_batch", "into 2 parts", {"micro_batch=2", "micro_batch=4"}),
        (
            {**SQUARE, "microbatches": 8}, "microbatches", "into 2 parts",
            {"microbatches=2", "microbatches=4", "global_batch=16"},
        ),
        ({**SQUARE, "global_batch": 3}, "global_batch", "into 2 parts", {"global_batch=2", "global_batch=4"}),
        (
            {**SQUARE, "local_batch": 3, "dp": 2}, "global_batch", "into 2 parts", {"local_batch=2", "local_batch=4"},
        ),
        # no one key would do: see the next test
        ({"layout": "2d", "tp": 7, "grid": "2x3", "model.hidden": 25, "model.heads": 5}, "grid", "6 ranks", set()),
    ],
)  # fmt: skip
def test_numbers_that_do_not_fit_are_refused_with_the_nearest_that_do(overrides, where, told, suggested):
    problem = only_problem(overrides)
    assert problem.kind == "arithmetic" and problem.where == where and told in problem.what
    assert {f"{key}={value}" for key, value in pairs(problem.suggestion)} == suggested


def test_where_no_one_key_would_do_all_that_are_typed_are_named():
    overrides = {"layout": "2d", "tp": 7, "grid": "2x3", "model.hidden": 25, "model.heads": 5}
    assert only_problem(overrides).suggestion == "tp=25 grid=null"
    both = only_problem({**overrides, "layout": "2.5d", "depth": 3})
    assert both.suggestion.startswith("tp=") and " grid=null depth=null" in both.suggestion


def test_ranks_that_are_left_of_a_world_and_make_no_grid_are_refused_with_the_worlds_that_do():
    own = {"strategy.own_axis": "tp", "strategy.tensor.kind": "2d", "tp": None, "dp": None, "pp": None}
    launched = only_problem(own, world=8)
    asked = only_problem({**own, "world": 8})
    gpus = only_problem(own, gpus=8)
    assert set(pairs(launched.suggestion)) == {("grid", "2x4"), ("dp", "2")}
    assert set(pairs(asked.suggestion)) == {("grid", "2x4"), ("dp", "2"), ("world", "4"), ("world", "16")}
    assert {("tp", "4"), ("grid", "2x4")} <= set(pairs(gpus.suggestion))


def test_every_size_that_does_not_divide_is_told_at_once():
    problems = problems_of({"layout": "2d", "tp": 9, "global_batch": 8})
    assert [problem.what.split("=")[0] for problem in problems] == [
        "model.hidden", "model.heads", "model.ffn", "micro_batch",
    ]  # fmt: skip
    assert all(problem.suggestion for problem in problems)
    assert all("row 3 x col 3" in problem.what for problem in problems)


def test_fewer_kv_heads_than_the_head_axis_is_not_built():
    problem = only_problem({"layout": "2d", "tp": 16, "model.kv_heads": 2})
    assert problem.kind == "not_built" and "model.kv_heads=4" in problem.suggestion and "tp=4" in problem.suggestion
    assert tiny_plan({"layout": "2d", "tp": 4, "model.kv_heads": 2})


def test_the_sequence_and_the_vocabulary_need_not_divide():
    for cell in CELLS.values():
        assert tiny_plan({**cell, "model.seq": 7, "model.vocab": 37})


def test_unset_microbatches_are_the_most_whose_samples_divide_where_four_a_stage_are_too_many():
    plan = tiny_plan({**CUBE, "pp": 2, "global_batch": 24})
    assert plan.batch.microbatches == 6 and plan.batch.micro_batch == 4
    uneven = tiny_plan({"layout": "2d", "tp": 4, "pp": 3, "model.layers": 6, "global_batch": 12})
    assert uneven.batch.microbatches == 6
    assert tiny_plan({"layout": "2d", "tp": 4, "pp": 4, "global_batch": 24}).batch.microbatches == 12


def test_an_unset_global_batch_is_one_that_divides():
    cube = {"layout": "3d", "tp": 27, "model.hidden": 36, "model.heads": 9, "global_batch": None}
    assert tiny_plan(cube).batch.global_batch == 54
    assert tiny_plan({"layout": "2d", "tp": 4, "global_batch": None}).batch.global_batch == 48


def test_backward_in_two_halves_keeps_what_it_gathered():
    halves = {"layout": "2d", "tp": 4, "pp": 2, "schedule": "zero_bubble"}
    assert tiny_plan({**halves, "strategy.tensor.form": "summa"})
    problem = only_problem({**halves, "strategy.tensor.save_gathered": False})
    assert problem.kind == "undefined" and "1f1b" in problem.suggestion


def test_panels_are_as_many_as_both_sides_of_a_grid_divide():
    legal = {**TWO_BY_THREE, "strategy.tensor.form": "summa"}
    assert tiny_plan(legal).tensor.forms[0][1] == ("summa", "summa")
    problem = only_problem({**legal, "model.ffn": 27})
    assert problem.kind == "arithmetic" and "model.ffn=27 is not divisible by 6" in problem.what


@pytest.mark.parametrize(
    ("layer", "role", "told"),
    [
        ("layers.1.mlp.up", "", "layers.1.mlp.up has no layer role"),
        ("layers.0.attention.out", "linear", "layers.0.attention.out reads what layers.0.attention.qkv has split"),
        ("head.head", "column_parallel", "head.head gives the logits"),
    ],
)
def test_a_layer_whose_role_does_not_fit_is_named(layer, role, told):
    plan = tiny_plan(layout="2d", tp=4)

    def changed(block):
        return replace(block, layers=tuple(replace(x, layer_role=role) if x.name == layer else x for x in block.layers))

    spec = replace(plan.spec, blocks=tuple(map(changed, plan.spec.blocks)))
    config = narrowed(fold(tiny_config(layout="2d"), frozenset())[0])
    (problem,) = plan.tensor.check(Request(config, spec, 1, 1, 4, 1, None))
    assert problem.kind == "undefined" and problem.where == "model.roles" and problem.suggestion == "tp=1"
    assert told in problem.what


# Forms


@pytest.mark.parametrize("cell", ["2d 4", "2d 2x3", "2.5d 8"])
def test_no_other_forms_that_divide_move_less(cell):
    plan = tiny_plan(CELLS[cell])
    samples = plan.batch.micro_batch
    choice = grid_forms.FormChoice(
        plan.spec, "auto", grid_of(plan).tensor_sizes(plan), samples * plan.spec.seq, samples
    )  # fmt: skip
    resolved = dict(plan.tensor.forms)
    for key, group in choice.groups.items():
        volumes = {forms: choice.volume(group[0], forms) for forms in choice.legal(group)}
        assert len(volumes) >= 4 and volumes[resolved[key]] == min(volumes.values())


def test_no_weight_moves_where_weights_are_larger_than_activations():
    plan = tiny_plan({"layout": "2d", "tp": 4, "model.seq": 1, "model.hidden": 64, "global_batch": 2})
    assert set(dict(plan.tensor.forms).values()) == {("stationary_w", "stationary_w")}
    inside = grid_of(plan).product_of(layer(plan, "layers.0.mlp.up"), plan).y
    assert inside == ActivationLayout(("col",), ("row",))
    assert grid_of(plan).product_of(layer(plan, "layers.0.mlp.down"), plan).y == grid_of(plan).boundary(plan)


@pytest.mark.parametrize("form", ["stationary_x", "stationary_y", "stationary_w", "summa"])
def test_a_form_that_is_asked_for_is_taken(form):
    plan = tiny_plan({"layout": "2d", "tp": 4, "strategy.tensor.form": form})
    assert set(dict(plan.tensor.forms).values()) == {(form, form)}


def test_only_pairs_that_divide_swap_the_axes():
    """2x3: an mlp of 16 inside divides by two rows but not by three columns, so no form but stationary_w fits."""
    plan = tiny_plan({**TWO_BY_THREE, "model.ffn": 16})
    assert dict(plan.tensor.forms)[24, 16, 16, 24] == ("stationary_w", "stationary_w")
    assert plan.batch.micro_batch % 6 == 0
    problem = only_problem({**TWO_BY_THREE, "model.ffn": 16, "micro_batch": 2})
    assert "into 6 parts" in problem.what


# Layouts


def test_gradients_are_partial_over_the_axes_whose_ranks_see_other_samples():
    deep, cube = tiny_plan(DEEP), tiny_plan(CUBE)
    assert layout_of(deep, "layers.0.mlp.up.up.weight").partial == ("depth",)
    assert layout_of(deep, "embedding.tokens.weight").partial == ("depth",)
    assert layout_of(deep, "layers.0.mlp.up.up.bias") == Layout((("col",),), ("depth", "row"))
    assert layout_of(cube, "layers.0.mlp.up.up.weight").partial == ()
    assert layout_of(cube, "layers.0.mlp.up.up.bias") == Layout((("y",),), ("x", "z"))
    assert layout_of(cube, "layers.0.mlp.down.bias") == Layout((("z",),), ("x", "y"))
    assert layout_of(cube, "layers.0.mlp_norm.weight") == Layout((("z",),), ("x", "y"))
    assert layout_of(cube, "embedding.position.weight") == Layout(((), ("z",)), ("x", "y"))


def test_axes_of_one_rank_are_partial_over_nothing():
    plan = tiny_plan({"layout": "2d", "tp": 4, "grid": "1x4", "model.hidden": 16})
    assert all(not layout_of(plan, name).partial for name in plan.spec.parameters)


# Thousands of random requests

COMMON = {"deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True}


FORMS = ["auto", "auto", "stationary_y", "stationary_x", "stationary_w", "summa"]


@st.composite
def requests(draw) -> dict:
    """Overrides of the tiny config around grids: more than half are legal, the others nearly so."""
    layout, side = draw(st.sampled_from(["2d", "2.5d", "3d"])), draw(st.integers(1, 3))
    deep = draw(st.integers(1, side)) if layout == "2.5d" else 1
    grid = None if layout == "3d" else draw(st.sampled_from([None, None, "1x4", "2x3", "3x2", "2x4"]))
    ranks = {"2d": side**2, "2.5d": deep * side**2, "3d": side**3}[layout]
    if grid:
        deep = min(deep, int(grid[0]))
        ranks = deep * int(grid[0]) * int(grid[2])
    pp = draw(st.sampled_from([1, 1, 2]))
    slip = draw(st.sampled_from([None, None, None, None, "tp", "heads", "ffn", "batch", "depth"]))
    return {
        "layout": layout,
        "tp": ranks + draw(st.integers(1, 5)) if slip == "tp" else ranks,
        "grid": grid,
        "depth": None if layout != "2.5d" else draw(st.sampled_from([3, 4])) if slip == "depth" else deep,
        "pp": pp,
        "dp": draw(st.sampled_from([1, 1, 2, 3])),
        "schedule": draw(st.sampled_from([None, "gpipe", "zero_bubble"])) if pp > 1 else None,
        "model.hidden": 72 if slip != "heads" else 80,
        "model.heads": 12 if slip != "heads" else draw(st.sampled_from([4, 8, 10])),
        "model.kv_heads": draw(st.sampled_from([None, None, 6, 2])) if slip != "heads" else None,
        "model.ffn": draw(st.sampled_from([None, 144, 36])) if slip != "ffn" else draw(st.sampled_from([30, 16, 31])),
        "model.vocab": draw(st.integers(32, 50)),
        "model.tied_embeddings": draw(st.booleans()),
        "model.activation": draw(st.sampled_from(["gelu", "swiglu"])),
        "strategy.tensor.form": "auto" if layout == "3d" else draw(st.sampled_from(FORMS)),
        "strategy.tensor.save_gathered": draw(st.sampled_from([True, True, False])),
        "strategy.data.kind": draw(st.sampled_from(["ddp", "zero1", "fsdp"])),
        "global_batch": draw(st.sampled_from([7, 12, 50] if slip == "batch" else [None, None, 432])),
        "microbatches": draw(st.sampled_from([None, None, 2, 4])),
    }


@settings(max_examples=examples(500), **COMMON)
@given(requests())
def test_a_random_request_is_a_plan_that_tiles_every_parameter_or_violations_whose_values_are_legal(overrides):
    try:
        plan = resolve(tiny_config(overrides))
    except ConfigError as error:
        assert len(set(error.problems)) == len(error.problems)
        for problem in error.problems:
            assert problem.what and problem.where and problem.suggestion
            assert problem.kind in ("arithmetic", "undefined", "not_built", "contradiction")
        if len(error.problems) == 1:
            for key, text in pairs(error.problems[0].suggestion):
                value = int(text) if text.isdecimal() else {"true": True, "false": False}.get(text, text)
                cures({**overrides, key: value}, error.problems[0].what)
        return
    check_plan(plan)


def cures(overrides: dict, what: str) -> None:
    """The plan is legal, or only the batch is left to change."""
    try:
        resolve(tiny_config(overrides))
    except ConfigError as error:
        assert all(problem.what != what for problem in error.problems)
        assert {problem.where for problem in error.problems} <= {"global_batch", "microbatches"}


def check_plan(plan: Plan) -> None:
    """Parts tile every parameter; samples, features and panels are split evenly."""
    assert prod(grid_of(plan).tensor_sizes(plan).values()) == plan.mesh.size("tp")
    coordinates = [plan.mesh.coordinate(rank) for rank in range(plan.mesh.num_ranks)]
    of_stage = [coordinate for coordinate in coordinates if coordinate["pp"] == 0]
    for shape, layout in {(p.shape, plan.tensor.layout(p, plan)) for p in plan.spec.parameters.values()}:
        cover(shape, layout, plan.mesh, of_stage)
    elements = plan.batch.micro_batch * prod(plan.spec.boundary_shape)
    assert prod(plan.tensor.boundary_shape(plan)) * plan.mesh.size("tp") == elements
    for layer in plan.spec.layers():
        product = grid_of(plan).product_of(layer, plan)
        for activation in (product.x, product.y) if product else ():
            assert plan.batch.micro_batch % prod(plan.mesh.size(axis) for axis in activation.rows) == 0
        if product and product.panels:
            assert layer.in_features % num_panels(product, plan.mesh.sizes) == 0


@pytest.mark.parametrize("kind", ["2d", "2.5d", "3d"])
def test_every_tp_is_laid_out_by_the_rules_or_not_at_all(kind):
    for tp in range(1, 301):
        for grid in (None, (1, 4), (2, 3), (3, 2), (4, 4)):
            for depth in (None, 1, 2, 3, 4):
                found = arrange(kind, tp, grid, depth)
                assert found == arranged(kind, tp, grid, depth), (tp, grid, depth)


def arranged(kind, tp, grid, depth):
    """Out of every depth x rows x columns that there is: a grid as asked, else square; no deeper than its sides."""
    rows_of = [n for n in range(1, tp + 1) if tp % n == 0]
    if kind == "3d":
        return next(({a: n for a in "xyz"} for n in rows_of if n**3 == tp), None)
    depths = [1] if kind == "2d" else [d for d in rows_of if depth in (None, d)]
    legal = [
        (d, rows, tp // d // rows)
        for d in depths
        for rows in rows_of
        if tp // d % rows == 0
        and ((rows, tp // d // rows) == grid if grid else rows * rows * d == tp)
        and d <= min(rows, tp // d // rows)
    ]
    deep, rows, columns = max(legal, default=(0, 0, 0))
    expected = {"depth": deep, "row": rows, "col": columns} if deep > 1 else {"row": rows, "col": columns}
    return expected if legal else None
