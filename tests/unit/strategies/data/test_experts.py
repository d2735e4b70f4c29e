"""Data strategies over experts that are distributed over a part of dp: buckets, layouts and FSDP units."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallelrun.planner.contract.data_strategy import Bucket
from parallelrun.planner.contract.parameters import held_parameters
from parallelrun.planner.contract.plan import Plan
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
        (4, 1, 1, 6, 1, 1),  # all experts everywhere, 4 copies
        (8, 2, 2, 2, 1, 1),  # 4 copies of 1 expert, 32 rows of whose up are left by tp
        (12, 2, 1, 2, 0, 0),  # 6 copies: neither 64 nor 16 is even
        (64, 2, 2, 2, 1, 0),  # 32 copies
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


def test_inner_groups_of_a_ring_are_the_same_ranks_for_experts():
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

    def test_a_router_travels_as_stored_beside_a_block_that_is_rounded(self):
        found = {unit.kind: unit for unit in self.found(dp=4, ep=2, **{"precision.name": "bf16"})}
        assert {kind: unit.rounded for kind, unit in found.items()} == {"block": True, "router": False, "experts": True}
        assert found["router"].module == "layers.1.moe.router"
