"""The torch-free half of Megatron's tensor strategy: checks, axes, layouts, collectives and memory in closed form."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallelrun.base.errors import ConfigError
from parallelrun.planner.contract.plan import Collective, Plan
from parallelrun.planner.contract.request import Request
from parallelrun.planner.model.model_spec import BlockSpec, Initialiser, LayerSpec, ModelSpec, ParameterSpec
from parallelrun.strategies.tensor.megatron.plan import Megatron1D
from tests.plans import narrow_config, tiny_plan

SEQUENCE = {"strategy.tensor.sequence_parallel": True}


def refused(**overrides) -> str:
    """What the user is told, suggestions included."""
    with pytest.raises(ConfigError) as caught:
        tiny_plan({key.replace("__", "."): value for key, value in overrides.items()})
    return "\n".join(f"{problem.what} -> {problem.suggestion}" for problem in caught.value.problems)


# Checks ---------------------------------------------------------------------------------------------------------------


def test_heads_must_divide_and_the_nearest_degrees_and_sizes_are_told():
    told = refused(tp=3, model__hidden=48, model__ffn=96)
    assert "model.heads=4 is not divisible by tp=3 -> tp=2 or tp=4 or model.heads=3 or model.heads=6" in told


def test_every_misfit_is_told_at_once():
    told = refused(tp=4, model__heads=6, model__hidden=24, model__ffn=42)
    assert "model.heads=6" in told and "model.ffn=42" in told


def test_kv_heads_divide_or_are_copied_evenly():
    tiny_plan(tp=4, model__kv_heads=2)
    told = refused(tp=4, model__heads=12, model__kv_heads=3, model__hidden=24)
    assert "model.kv_heads=3" in told and "model.kv_heads=2 or model.kv_heads=4" in told


def test_the_vocabulary_never_needs_to_divide():
    assert tiny_plan(tp=4, model__vocab=50257).spec.vocab == 50257


def test_the_sequence_must_divide_only_when_it_is_cut():
    tiny_plan({"tp": 4, "model.seq": 6})
    told = refused(tp=4, model__seq=6, strategy__tensor__sequence_parallel=True)
    assert "model.seq=6 is not divisible by tp=4" in told and "model.seq=4 or model.seq=8" in told


def test_a_model_without_a_sequence_cannot_be_cut_along_it():
    told = refused(tp=2, model__name="mlp", model__preset="mlp", strategy__tensor__sequence_parallel=True)
    assert "has no sequence to cut" in told


@settings(deadline=None)
@given(st.integers(2, 12), st.integers(1, 12), st.integers(1, 12), st.integers(1, 40), st.booleans())
def test_every_degree_that_is_suggested_is_legal(tp, head_groups, kv_heads, ffn, sequence_parallel):
    overrides = {"model.heads": head_groups * kv_heads, "model.kv_heads": kv_heads, "model.ffn": ffn, "model.seq": 12}
    overrides |= {"model.hidden": head_groups * kv_heads * 2, "strategy.tensor.sequence_parallel": sequence_parallel}
    spec = tiny_plan({**overrides, "strategy.tensor.sequence_parallel": False}).spec
    config = narrow_config(overrides)
    for problem in Megatron1D.check(Request(config, spec, 1, 1, tp, 1, None)):
        for degree in map(int, re.findall(r"\btp=(\d+)", problem.suggestion)):
            assert degree != tp and not Megatron1D.check(Request(config, spec, 1, 1, degree, 1, None)), problem


def own_module(*roles: str) -> ModelSpec:
    """A user's model of one linear layer per role."""
    layers = []
    for number, role in enumerate(roles):
        weight = ParameterSpec(f"net.{number}.weight", (8, 8), Initialiser("own"), role)
        layers.append(LayerSpec(f"net.{number}", role, 8, 8, (weight,)))
    blocks = (BlockSpec("net", "module", tuple(layers), 0.0),)
    return ModelSpec("module", "features", blocks, (8,), (8,), 1, 8)


def told_of(spec: ModelSpec) -> list[str]:
    return [problem.what for problem in Megatron1D.check(Request(narrow_config(), spec, 1, 1, 2, 1, None))]


def test_a_users_module_without_layer_roles_is_refused_by_the_name_of_its_layer():
    assert told_of(own_module("", "")) == ["layer net.0 has no layer role, so tp=2 has nothing to split"]
    assert told_of(own_module("column_parallel", "row_parallel")) == []


def test_only_a_row_layer_may_read_what_a_column_layer_has_split():
    (told,) = told_of(own_module("column_parallel", "", "row_parallel"))
    assert told.startswith("layer net.1 reads what net.0 has split")
    assert told_of(own_module("", "column_parallel", "row_parallel", "")) == []


def test_the_widths_of_a_users_column_and_row_layers_must_divide_and_columns_alone_need_not():
    request = Request(narrow_config(), own_module("column_parallel", "row_parallel"), 1, 1, 3, 1, None)
    assert "layer net.0: 8 features are not divisible by tp=3" in [
        problem.what for problem in Megatron1D.check(request)
    ]
    assert Megatron1D.check(replace(request, spec=own_module("column_parallel"))) == []


# Axes and layouts -----------------------------------------------------------------------------------------------------


def test_more_ranks_than_kv_heads_factor_the_axis():
    assert tiny_plan(tp=2, model__kv_heads=2).mesh.mesh_dims[2:] == (("tp", 2),)
    mesh = tiny_plan(tp=4, model__kv_heads=2).mesh
    assert mesh.mesh_dims[2:] == (("tp_kv", 2), ("tp_copy", 2)) and mesh.size("tp") == 4


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("tp", "kv_heads"), [(2, 4), (4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("vocab", [32, 7, 3])
def test_the_ranks_hold_every_element_and_copies_only_where_the_layout_says(tp, kv_heads, vocab, sequence_parallel):
    overrides = {"tp": tp, "model.kv_heads": kv_heads, "model.vocab": vocab, "dataset.vocab": vocab}
    plan = tiny_plan(overrides | ({**SEQUENCE} if sequence_parallel else {}))
    for parameter in plan.spec.parameters.values():
        layout = plan.tensor.layout(parameter, plan)
        holders: dict[tuple[int, ...], int] = {}
        for rank in range(plan.world):
            ranges = layout.ranges(parameter.shape, plan.mesh.sizes, plan.mesh.coordinate(rank))
            for element in product(*(range(*pair) for pair in ranges)):
                holders[element] = holders.get(element, 0) + 1
        assert len(holders) == parameter.numel, parameter.name
        assert set(holders.values()) == {expected_copies(parameter, tp, kv_heads)}, parameter.name


def expected_copies(parameter: ParameterSpec, tp: int, kv_heads: int) -> int:
    if (
        parameter.layer_role == "norm"
        or parameter.layer_role == "position_embedding"
        or parameter.name.endswith("out.bias")
    ):
        return tp
    if parameter.name.endswith("down.bias"):
        return tp
    is_kv = ".k." in parameter.name or ".v." in parameter.name
    return max(1, tp // kv_heads) if is_kv else 1


@pytest.mark.parametrize(("tp", "kv_heads"), [(2, 2), (4, 2), (4, 1)])
def test_a_rank_holds_the_kv_head_that_its_query_heads_attend_with(tp, kv_heads):
    plan = tiny_plan(tp=tp, model__kv_heads=kv_heads)
    head_dim, group = plan.spec.hidden // plan.spec.heads, plan.spec.heads // kv_heads
    q, k = (plan.spec.parameters[f"layers.0.attention.qkv.{name}.weight"] for name in "qk")
    for rank in range(tp):
        coordinate = plan.mesh.coordinate(rank)
        (first, last), _ = plan.tensor.layout(q, plan).ranges(q.shape, plan.mesh.sizes, coordinate)
        (start, stop), _ = plan.tensor.layout(k, plan).ranges(k.shape, plan.mesh.sizes, coordinate)
        attended = {row // head_dim // group for row in range(first, last)}
        assert attended == {row // head_dim for row in range(start, stop)}


def test_gradients_of_slices_and_of_copied_heads_are_partial():
    whole, cut = tiny_plan(tp=4, model__kv_heads=2), tiny_plan({"tp": 4, "model.kv_heads": 2, **SEQUENCE})
    partial = {p.name: cut.tensor.layout(p, cut).partial for p in cut.spec.parameters.values()}
    assert partial["layers.0.attention_norm.weight"] == ("tp",)
    assert partial["embedding.position.weight"] == ("tp",)
    assert partial["layers.0.mlp.down.bias"] == ("tp",)
    assert partial["layers.0.attention.qkv.k.weight"] == ("tp_copy",)
    assert partial["layers.0.attention.qkv.q.weight"] == ()
    only = {p.name for p in whole.spec.parameters.values() if whole.tensor.layout(p, whole).partial}
    assert only == {name for name in whole.spec.parameters if ".qkv.k." in name or ".qkv.v." in name}


def test_between_blocks_pass_slices_under_sequence_parallel():
    for overrides, shape in (({}, (2, 8, 16)), (SEQUENCE, (2, 4, 16))):
        plan = tiny_plan({"tp": 2, "micro_batch": 2, **overrides})
        assert plan.tensor.boundary_shape(plan) == shape


# Collectives ----------------------------------------------------------------------------------------------------------


def sent(plan: Plan) -> dict[tuple[str, str], Collective]:
    rows = plan.tensor.collectives(plan.spec.blocks, plan)
    return {(row.operation, row.purpose): row for row in rows}


def test_one_rank_sends_nothing():
    assert tiny_plan().tensor.collectives(tiny_plan().spec.blocks, tiny_plan()) == []


def test_a_layer_sums_activations_twice_forward_and_twice_backward():
    """SC21: a layer all-reduces b s h four times a microbatch, which is 8 b s h (t - 1) / t on the wire."""
    plan = tiny_plan(tp=2, micro_batch=2, precision__name="bf16")
    layer = plan.spec.block("layers.1")
    (row,) = plan.tensor.collectives((layer,), plan)
    bsh = 2 * plan.spec.seq * plan.spec.hidden
    assert row == Collective("tp", "all_reduce", "activations", 4 * 4, 4 * 4 * bsh * 2)


def test_sequence_parallel_moves_as_much_and_gathers_inputs_again():
    plan = tiny_plan({"tp": 2, "micro_batch": 8, **SEQUENCE})
    layer = plan.spec.block("layers.0")
    apart = replace(plan, tensor=replace(plan.tensor, overlap=False))
    calls = {row.operation: row.calls for row in apart.tensor.collectives((layer,), apart)}
    assert calls == {"all_gather": 4, "reduce_scatter": 4}  # 4 all-reduces, each as two halves
    calls = {row.operation: row.calls for row in plan.tensor.collectives((layer,), plan)}
    assert calls == {"all_gather": 6, "reduce_scatter": 4}


def test_the_loss_exchanges_three_numbers_a_target_in_the_accurate_dtype():
    row = sent(tiny_plan(tp=2, micro_batch=4, precision__name="bf16"))["all_reduce", "loss"]
    assert row.calls == 2 * 2 and row.payload_bytes == 8 * 8 * 3 * 4


@pytest.mark.parametrize(("dropout", "again"), [(0.0, 1), (0.1, 2)])
def test_recomputation_repeats_the_forward_up_to_the_last_tensor_needed(dropout, again):
    plan = tiny_plan(tp=2, micro_batch=8, recompute="full", dropout=dropout)
    (row,) = plan.tensor.collectives((plan.spec.block("layers.0"),), plan)
    assert row.calls == 4 + again


# Memory ---------------------------------------------------------------------------------------------------------------


def bytes_per_layer(overrides: dict) -> float:
    """In units of s b h, for a layer of usual proportions in bf16, without the rounded weights."""
    sizes = {"model.hidden": 1024, "model.heads": 16, "model.seq": 512, "micro_batch": 4, "precision.name": "bf16"}
    plan = tiny_plan({**sizes, "model.layers": 2, "strategy.tensor.overlap": True, **overrides})
    block = plan.spec.block("layers.0")
    single = replace(plan, batch=replace(plan.batch, micro_batch=2))
    rows = plan.tensor.saved_bytes(block, plan) - single.tensor.saved_bytes(block, single)  # the weights cancel
    return rows / (2 * 512 * 1024)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_layer_keeps_what_the_paper_says_less_what_attention_recomputes(tp, dropout):
    """Korthikanti et al. 2022: 10 + 24/t, and 34/t under sequence parallel (their s x s tensors apart: flash attention
    keeps none). Two bytes of the 10 are dropout masks; statistics of norms and attention add a little."""
    masks = 2 if dropout else 0
    assert bytes_per_layer({"tp": tp, "dropout": dropout}) == pytest.approx(8 + masks + 24 / tp, rel=0.01)
    sliced = bytes_per_layer({"tp": tp, "dropout": dropout, **SEQUENCE})
    assert sliced == pytest.approx((32 + masks) / tp, rel=0.01)


def test_full_recomputation_keeps_two_bytes_an_element():
    assert bytes_per_layer({"recompute": "full"}) == 2
    assert bytes_per_layer({"recompute": "full", "tp": 4, **SEQUENCE}) == 0.5


def test_what_a_model_without_roles_says_of_itself_is_taken():
    plan = tiny_plan(micro_batch=4)
    block = BlockSpec("own", "module", (LayerSpec("own.net", "", 8, 8),), 0.0, saved_elements=10.0)
    assert plan.tensor.saved_bytes(block, plan) == 4 * 10 * 4


def test_the_plan_half_does_not_import_torch():
    code = "import sys, parallelrun.strategies.tensor.megatron.plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
