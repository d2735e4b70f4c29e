"""Data strategies over experts that lie on a part of dp: buckets, layouts, FSDP units, what is sent, and what is
refused."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallelrun.base.errors import ConfigError, Problem
from parallelrun.planner.contract.data_strategy import Bucket
from parallelrun.planner.contract.parameters import held_parameters
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.predict.prediction import memory
from parallelrun.strategies.data.common import bucket_prediction, buckets
from parallelrun.strategies.data.fsdp.units import Unit
from tests.plans import tiny_plan

EXPERTS = {"model.experts": 4, "model.expert_period": 2, "model.layers": 2}
KIND, SHARD = "strategy.data.kind", "strategy.data.shard"
WAYS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "zero1": {KIND: "zero1"},
    "zero2": {KIND: "zero2"},
    "fsdp": {KIND: "fsdp"},
    "hsdp": {KIND: "fsdp", SHARD: 2},
}
FP32 = 4


def plan_of(**overrides: Any) -> Plan:
    return tiny_plan({**EXPERTS, **{key.replace("__", "."): value for key, value in overrides.items()}})


def is_expert(name: str) -> bool:
    return ".experts." in name


def numel(plan: Plan, of_experts: bool) -> int:
    return sum(p.numel for name, p in plan.spec.parameters.items() if is_expert(name) == of_experts)


def rows(plan: Plan, rank: int = 0) -> dict[tuple[str, str], tuple[int, int]]:
    """(calls, payload) by axis and operation."""
    coordinate = plan.mesh.coordinate(rank)
    found = plan.data.collectives(coordinate["pp"], coordinate, plan)
    return {(row.axis, row.operation): (row.calls, row.payload_bytes) for row in found}


def partitioned(plan: Plan, rank: int, padded: bool) -> list[Bucket]:
    trained = bucket_prediction.trained_parameters(plan, 0)
    return buckets.partition(
        trained, bucket_prediction.local_shapes(trained, plan.mesh.coordinate(rank), plan), plan, padded=padded
    )


class TestBuckets:
    @settings(max_examples=25, deadline=None)
    @given(
        st.sampled_from([(2, 1), (2, 2), (4, 2), (4, 4), (8, 2)]),
        st.sampled_from([0.0, 0.002, 0.01, 25.0]),
        st.booleans(),
    )
    def test_no_bucket_mixes_axes_and_what_has_copies_is_in_exactly_one(self, degrees, bucket_mb, padded):
        dp, ep = degrees
        plan = plan_of(dp=dp, ep=ep, strategy__data__bucket_mb=bucket_mb, model__layers=4)
        trained = bucket_prediction.trained_parameters(plan, 0)
        filled = partitioned(plan, 0, padded)
        for bucket in filled:
            assert {is_expert(trained[i].name) and ep > 1 for i in bucket.indices} == {bucket.axis == "expert_dp"}
        found = sorted(index for bucket in filled for index in bucket.indices)
        assert found == [i for i, held in enumerate(trained) if not (is_expert(held.name) and ep == dp > 1)]

    def test_buckets_of_both_axes_are_launched_by_which_backward_fills_first_alike_on_all_ranks(self):
        plan = plan_of(dp=4, ep=2, model__layers=4, model__expert_period=1, strategy__data__bucket_mb=0.004)
        first, *others = [partitioned(plan, rank, padded=False) for rank in range(4)]
        assert all(other == first for other in others)
        last_arrivals = [min(bucket.indices) for bucket in first]
        assert last_arrivals == sorted(last_arrivals, reverse=True)
        axes = [bucket.axis for bucket in first]
        assert axes != sorted(axes) and axes != sorted(axes, reverse=True), "one axis after the other would wait"


def first_dims(plan: Plan) -> set[tuple[bool, tuple[str, ...]]]:
    """(of experts, the axes of several ranks that split dim 0 of the optimizer's state) of every parameter."""
    state = plan.data.state_layout
    return {
        (is_expert(held.name), tuple(a for a in state(held.spec, held.layout, plan).dims[0] if plan.mesh.size(a) > 1))
        for held in held_parameters(plan, 0)
    }


class TestLayouts:
    @pytest.mark.parametrize(
        "strategy, added", [("ddp", ()), ("zero1", ("dp",)), ("zero2", ("dp",)), ("fsdp", ("dp",))]
    )
    def test_the_copies_of_an_expert_share_its_update_and_nobody_else(self, strategy, added):
        plan = plan_of(dp=4, ep=2, **WAYS[strategy])
        of_experts = ("ep", *(f"expert_{axis}" for axis in added))
        assert first_dims(plan) == {(True, of_experts), (False, added)}

    def test_hsdp_splits_experts_over_what_ep_leaves_of_a_shard(self):
        plan = plan_of(dp=8, ep=2, **{KIND: "fsdp", SHARD: 4})
        assert first_dims(plan) == {(True, ("ep", "expert_dp_shard")), (False, ("dp_shard",))}


def split_dims(plan: Plan) -> dict[str, int]:
    """By kind of expert matrix: the dim that the copies of it share, as the optimizer's state lies."""
    state, found = plan.data.state_layout, {}
    for held in held_parameters(plan, 0):
        if is_expert(held.name):
            layout = state(held.spec, held.layout, plan)
            (found[held.name.rpartition(".")[2]],) = (
                dim for dim, axes in enumerate(layout.dims) if axes != held.layout.dims[dim]
            )
    return found


class TestSplitDim:
    """Dim 0 (experts) where they are dealt out evenly, else dim 1 (64 rows of up, 16 of down) where that is even."""

    @pytest.mark.parametrize("dp, ep, tp, experts, up, down", [
        (4, 2, 1, 4, 0, 0),  # 2 experts, 2 copies
        (4, 2, 1, 6, 1, 1),  # 3 experts
        (4, 2, 1, 2, 1, 1),
        (4, 1, 1, 6, 1, 1),  # all experts everywhere, 4 copies
        (4, 1, 1, 8, 0, 0),
        (8, 2, 2, 2, 1, 1),  # 4 copies of 1 expert, 32 rows of whose up are left by tp
        (12, 2, 1, 2, 0, 0),  # 6 copies: neither 64 nor 16 is even
        (64, 2, 1, 2, 1, 0),  # 32 copies
        (64, 2, 2, 2, 1, 0),
        (128, 2, 2, 2, 0, 0),  # 64 copies, and tp leaves 32 rows of up
    ])  # fmt: skip
    @pytest.mark.parametrize("strategy", ["zero1", "zero2", "fsdp"])
    def test_it_is_the_first_even_one(self, strategy, dp, ep, tp, experts, up, down):
        changes = {"global_batch": 2 * dp, "dataset.samples": 2 * dp, "model.experts": experts}
        assert split_dims(plan_of(dp=dp, ep=ep, tp=tp, **changes, **WAYS[strategy])) == {"up": up, "down": down}

    def test_hsdp_asks_what_ep_leaves_of_a_shard(self):
        """4 copies of 2 experts, of which 2 share one."""
        changes = {"dp": 8, "ep": 2, "model.experts": 4}
        assert split_dims(plan_of(**changes, **WAYS["fsdp"])) == {"up": 1, "down": 1}
        assert split_dims(plan_of(**changes, **{KIND: "fsdp", SHARD: 4})) == {"up": 0, "down": 0}
        few = {**changes, "model.experts": 2}
        assert split_dims(plan_of(**few, **{KIND: "fsdp", SHARD: 4})) == {"up": 1, "down": 1}

    @pytest.mark.parametrize("strategy", ["zero1", "zero2", "fsdp"])
    def test_the_state_of_one_expert_is_shared_out_evenly(self, strategy):
        """AdamW's 8 bytes an element: two experts on 4 ranks."""
        plan = plan_of(dp=4, ep=2, model__experts=2, **WAYS[strategy])
        others = [p for p in plan.spec.parameters.values() if not is_expert(p.name)]
        first = sum(-(-p.shape[0] // 4) * prod(p.shape[1:]) for p in others)
        assert memory(plan, 0).optimizer == 8 * (numel(plan, of_experts=True) // 4 + first)

    def test_a_chunk_inside_of_several_experts_is_kept_twice(self):
        """In the weights it does not lie in one piece, and optimizers need it so."""
        kept = {}
        for experts in (4, 6, 2):
            plan = plan_of(dp=4, ep=2, model__experts=experts, **WAYS["zero1"])
            extra = memory(plan, 0).weights - memory(plan_of(dp=4, ep=2, model__experts=experts), 0).weights
            kept[experts] = extra / (FP32 * numel(plan, of_experts=True) // 4)
        assert kept == {4: 0, 6: 1, 2: 0}


class TestTraffic:
    def test_hsdp_sums_experts_shards_over_the_same_replicas_as_all_others(self):
        plan = plan_of(dp=8, ep=2, **{KIND: "fsdp", SHARD: 4})
        found = rows(plan)
        scattered = [found[axis, "reduce_scatter"] for axis in ("dp_shard", "expert_dp_shard")]
        assert found["dp_replicate", "all_reduce"] == (
            sum(calls for calls, _ in scattered), scattered[0][1] // 4 + scattered[1][1] // 2
        )  # fmt: skip

    def test_inner_groups_of_a_ring_are_the_same_ranks_for_experts(self):
        ring = {KIND: "ring", "strategy.data.algorithm": "hierarchical"}
        sizes = {}
        for ep, group_size in [(2, 4), (4, 2), (2, 2)]:
            plan = plan_of(dp=8, ep=ep, **ring, **{"strategy.data.group_size": group_size})
            sizes[ep, group_size] = plan.data.algorithm.over("expert_dp", plan).group_size
            assert plan.data.algorithm.over("dp", plan).group_size == group_size
        assert sizes == {(2, 4): 2, (4, 2): 1, (2, 2): 1}


class TestUnits:
    def found(self, **overrides: Any) -> list[Unit]:
        plan = plan_of(**{KIND: "fsdp", "model.tied_embeddings": False, **overrides})
        return [unit for unit in plan.data.units(plan, 0) if unit.block == "layers.1"]

    def test_experts_are_a_unit_of_their_own_around_their_layer(self):
        block, experts = self.found(dp=4, ep=2)
        assert (block.kind, block.module, block.axis) == ("block", "layers.1", "dp")
        assert (experts.kind, experts.module, experts.axis) == ("experts", "layers.1.moe", "expert_dp")
        assert {is_expert(p.name) for p in experts.parameters} == {True}
        assert not any(is_expert(p.name) for p in block.parameters)

    def test_without_ep_they_are_part_of_their_block(self):
        (block,) = self.found(dp=4)
        assert any(is_expert(p.name) for p in block.parameters)

    def test_experts_without_copies_are_in_no_unit(self):
        (block,) = self.found(dp=4, ep=4)
        assert not any(is_expert(p.name) for p in block.parameters)

    def test_a_router_travels_as_stored_beside_a_block_that_is_rounded(self):
        found = {unit.kind: unit for unit in self.found(dp=4, ep=2, **{"precision.name": "bf16"})}
        assert {kind: unit.rounded for kind, unit in found.items()} == {"block": True, "router": False, "experts": True}
        assert found["router"].module == "layers.1.moe.router"

    def test_a_gathered_block_is_counted_with_its_experts(self):
        """Of what is let go two blocks are held: here the layer with experts, and the one beside it; and the gradients
        that the head has left for the root to reduce."""
        plan = plan_of(dp=4, ep=2, **WAYS["fsdp"])
        place, held = plan.mesh.coordinate(0), held_parameters(plan, 0)
        layers = [p for p in held if p.block.startswith("layers.")]
        local = sum(prod(p.layout.local_shape(p.spec.shape, plan.mesh.sizes, place)) for p in layers)
        ends = sum(-(-p.spec.shape[0] // 4) * 4 * prod(p.spec.shape[1:]) for p in held if p not in layers)
        assert plan.data.gathered_bytes(0, place, plan) == FP32 * ends
        names = plan.stages[0].blocks
        last = max(index for index, name in enumerate(names) if name.startswith("layers."))
        assert names[last - 1].startswith("layers.") and names[last + 1 :] == ("head",)
        left = sum(prod(p.spec.shape) for p in held if p.block == "head" or p.spec.name in plan.spec.readers)
        assert plan.data.backward_bytes(0, 0, place, plan)[last] == FP32 * (local + left)


def refused(**overrides: Any) -> tuple[Problem, ...]:
    with pytest.raises(ConfigError) as caught:
        plan_of(dp=4, ep=2, **overrides)
    return caught.value.problems


class TestRefusals:
    @pytest.mark.parametrize("overrides", [
        {KIND: "local_sgd"},
        {KIND: "diloco"},
        {KIND: "ps", "strategy.data.consistency": "async"},
        {KIND: "ps", "strategy.data.staleness": 2},
        {KIND: "ps", "strategy.data.backup_workers": 1},
    ], ids=str)  # fmt: skip
    def test_replicas_that_are_not_in_step_have_no_tokens_to_exchange(self, overrides):
        (problem,) = refused(**overrides)
        assert problem.kind == "undefined" and "not in step" in problem.what
        assert "ep=1" in problem.suggestion and "strategy.data.kind=ddp" in problem.suggestion

    @pytest.mark.parametrize("key, value, fix", [
        ("reduction", "adasum", "strategy.data.reduction=average"),
        ("process_sets", [[0, 1], [2, 3]], "strategy.data.process_sets=[]"),
        ("worker_batches", [3, 3, 3, 2], "strategy.data.worker_batches=[]"),
    ])  # fmt: skip
    def test_what_takes_horovods_workers_out_of_step_is_named(self, key, value, fix):
        (problem,) = refused(**{KIND: "horovod", f"strategy.data.{key}": value})
        assert problem.kind == "undefined" and problem.where == f"strategy.data.{key}"
        assert problem.suggestion == f"{fix} or ep=1"

    def test_a_parameter_server_has_no_shards_of_experts(self):
        (problem,) = refused(**{KIND: "ps"})
        assert problem.kind == "not_built" and problem.suggestion == "strategy.data.kind=ddp or ep=1"

    @pytest.mark.parametrize("kind", ["ddp", "ring", "horovod"])
    @pytest.mark.parametrize("compression", ["fp16", "powersgd"])
    def test_compressed_sums_are_not_built_for_experts(self, kind, compression):
        (problem,) = refused(**{KIND: kind, "strategy.data.compression": compression})
        assert problem.kind == "not_built" and "strategy.data.compression=none" in problem.suggestion
        assert plan_of(dp=4, **{KIND: kind, "strategy.data.compression": compression})

    def test_shards_that_ep_does_not_divide_are_refused_with_numbers(self):
        with pytest.raises(ConfigError) as caught:
            plan_of(dp=4, ep=4, **WAYS["hsdp"])
        (problem,) = caught.value.problems
        assert (
            "ep=4 does not divide strategy.data.shard=2" in problem.what
            and "strategy.data.shard=4" in problem.suggestion
        )

    def test_inner_groups_that_cut_the_experts_copies_unevenly_are_refused(self):
        ring = {KIND: "ring", "strategy.data.algorithm": "hierarchical", "strategy.data.group_size": 3}
        with pytest.raises(ConfigError) as caught:
            plan_of(dp=12, ep=2, global_batch=12, **ring)
        (problem,) = caught.value.problems
        assert problem.where == "strategy.data.group_size" and "strategy.data.group_size=4" in problem.suggestion
