"""The torch-free half of Megatron's tensor strategy: checks, axes, layouts, collectives and memory in closed form."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallelrun.base.errors import ConfigError
from parallelrun.planner.contract.plan import Collective
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


# Axes, layouts and collectives


def test_more_ranks_than_kv_heads_factor_the_axis():
    assert tiny_plan(tp=2, model__kv_heads=2).mesh.mesh_dims[2:] == (("tp", 2),)
    mesh = tiny_plan(tp=4, model__kv_heads=2).mesh
    assert mesh.mesh_dims[2:] == (("tp_kv", 2), ("tp_copy", 2)) and mesh.size("tp") == 4


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


def test_a_layer_sums_activations_twice_forward_and_twice_backward():
    """SC21: a layer all-reduces b s h four times a microbatch, which is 8 b s h (t - 1) / t on the wire."""
    plan = tiny_plan(tp=2, micro_batch=2, precision__name="bf16")
    layer = plan.spec.block("layers.1")
    (row,) = plan.tensor.collectives((layer,), plan)
    bsh = 2 * plan.spec.seq * plan.spec.hidden
    assert row == Collective("tp", "all_reduce", "activations", 4 * 4, 4 * 4 * bsh * 2)


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
