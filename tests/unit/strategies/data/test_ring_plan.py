"""What `strategy=ring` says before anything runs: settings, refusals, and what every rank will send."""

from __future__ import annotations

import pytest

from parallelrun.strategies.data.common.allreduce.algorithm import NativeAllReduce
from parallelrun.strategies.data.common.allreduce.rings import HierarchicalAllReduce, RingAllReduce
from parallelrun.strategies.data.common.allreduce.trees import HalvingDoubling
from tests.plans import tiny_plan

RING = {"strategy.data.kind": "ring"}
SENT = ("dp", "send")
HIERARCHICAL = {**RING, "strategy.data.algorithm": "hierarchical"}


def test_the_algorithm_is_the_ring_unless_another_is_asked_for():
    assert tiny_plan({"dp": 4, **RING}).data.algorithm == RingAllReduce()
    for name, asked in {"native": NativeAllReduce(), "halving_doubling": HalvingDoubling()}.items():
        assert tiny_plan({"dp": 4, **RING, "strategy.data.algorithm": name}).data.algorithm == asked


@pytest.mark.parametrize(
    ("overrides", "size", "told"),
    [
        ({"dp": 4, "strategy.data.group_size": 4}, 4, ""),
        ({"dp": 8, "cluster.gpus_per_node": 4}, 4, "the ranks of dp in a host"),
        ({"dp": 8, "tp": 2, "cluster.gpus_per_node": 4}, 2, "the ranks of dp in a host"),
        ({"dp": 2, "cluster.gpus_per_node": 8}, 2, "the ranks of dp in a host"),
        ({"dp": 4, "tp": 2, "cluster.gpus_per_node": 1}, 1, "the ranks of dp in a host"),
        ({"dp": 8}, 2, "cluster.gpus_per_node is not set"),
        ({"dp": 1}, 1, ""),
    ],
)
def test_inner_groups_are_what_shares_a_host(overrides, size, told):
    plan = tiny_plan({**HIERARCHICAL, "global_batch": 16, **overrides})
    assert plan.data.algorithm == HierarchicalAllReduce(size)
    assert [text for text in plan.filled if "group_size" in text] == (
        [f"group_size={size} (filled: dp {plan.mesh.size('dp')}, {told})"] if told else []
    )
