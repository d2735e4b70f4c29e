"""What `strategy=ring` says before anything runs: settings, refusals, and what every rank will send."""

from __future__ import annotations

import pytest

from parallelrun.planner.facts.document import link_rows
from parallelrun.planner.predict import prediction
from parallelrun.strategies.data.common.allreduce.algorithm import Algorithm, NativeAllReduce
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


def test_the_busiest_member_sends_what_the_papers_say():
    """Patarasuk and Yuan 2009; Thakur et al. 2005: above a power of two, two more messages of all the numbers."""
    numel = 4800

    def busiest(algorithm: Algorithm, size: int) -> int:
        return max(algorithm.counts(size, index, numel).elements for index in range(size))

    for size in (2, 3, 4, 6, 8):
        power = 2 ** (size.bit_length() - 1)
        assert busiest(RingAllReduce(), size) == pytest.approx(2 * (size - 1) / size * numel)
        assert busiest(HalvingDoubling(), size) == pytest.approx((2 * (power - 1) / power + (power < size)) * numel)
    grouped = 2 * (4 - 1) / 4 + 2 * (3 - 1) / 3 / 4
    assert busiest(HierarchicalAllReduce(4), 12) == pytest.approx(grouped * numel)


@pytest.mark.parametrize(
    ("overrides", "num_links"),
    [
        ({"dp": 3, "tp": 2, "global_batch": 12, "model.vocab": 37, **RING}, 2 * 3),
        ({"dp": 2, "pp": 2, **RING}, 2 * 2),
        ({"dp": 4, **HIERARCHICAL}, 4 * 2),
        ({"dp": 4, **RING, "strategy.data.algorithm": "native"}, 0),
        ({"dp": 4}, 0),
        ({"dp": 1, **RING}, 0),
    ],
    ids=str,
)
def test_links_are_listed_and_add_up_to_what_ranks_send(overrides, num_links):
    plan = tiny_plan(overrides)
    rows = link_rows(plan)
    assert len(rows) == num_links
    for rank in range(plan.world if rows else 0):
        sent = [row.payload_bytes for row in prediction.collectives(plan, rank) if (row.axis, row.operation) == SENT]
        assert [sum(row["bytes"] for row in rows if row["from"] == rank)] == sent
    coordinate = plan.mesh.coordinate
    assert all(coordinate(row["to"])[axis] == coordinate(row["from"])[axis] for row in rows for axis in ("pp", "tp"))
