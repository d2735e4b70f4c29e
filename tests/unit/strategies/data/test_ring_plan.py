"""What `strategy=ring` says before anything runs: settings, refusals, and what every rank will send."""

from __future__ import annotations

from typing import Any

import pytest

from parallelrun.base.errors import ConfigError
from parallelrun.planner.facts.document import link_rows
from parallelrun.planner.predict import prediction
from parallelrun.planner.predict.traffic import traffic_of
from parallelrun.planner.resolve.freeze import freeze, load_frozen
from parallelrun.planner.resolve.resolve_config import resolve
from parallelrun.strategies.data.common.allreduce.algorithm import Algorithm, NativeAllReduce
from parallelrun.strategies.data.common.allreduce.rings import HierarchicalAllReduce, RingAllReduce
from parallelrun.strategies.data.common.allreduce.trees import HalvingDoubling
from tests.plans import tiny_config, tiny_plan

RING = {"strategy.data.kind": "ring"}
SENT = ("dp", "send")
HIERARCHICAL = {**RING, "strategy.data.algorithm": "hierarchical"}


def refused(overrides: dict[str, Any]) -> str:
    given = frozenset(overrides) - {"strategy.data.kind"}
    with pytest.raises(ConfigError) as error:
        resolve(tiny_config(overrides), given=given)
    return "\n".join(f"{p.kind}: {p.what}; {p.suggestion}" for p in error.value.problems)


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


def test_what_means_nothing_is_refused_with_what_would_do():
    assert "algorithm=rnig is unknown" in refused({"dp": 2, **RING, "strategy.data.algorithm": "rnig"})
    uneven = refused({"dp": 6, "global_batch": 12, **HIERARCHICAL, "strategy.data.group_size": 4})
    assert "arithmetic: inner groups of 4 do not make up dp=6" in uneven and "group_size=3" in uneven
    assert "(cluster.gpus_per_node / tp=1)" in refused(
        {"dp": 6, "global_batch": 12, **HIERARCHICAL, "cluster.gpus_per_node": 4}
    )
    assert "unread" in refused({"dp": 4, **RING, "strategy.data.group_size": 2})
    assert "not a whole number" in refused({"dp": 4, **HIERARCHICAL, "strategy.data.group_size": 0})
    assert "staleness=2 is read by none" in refused({"dp": 2, **RING, "staleness": 2})
    assert "algorithm=ring is read by none" in refused({"dp": 2, "strategy.data.algorithm": "ring"})


@pytest.mark.parametrize("overrides", [RING, HIERARCHICAL], ids=["ring", "hierarchical"])
def test_ranks_resolve_the_frozen_config_to_the_same_plan(overrides):
    config = tiny_config({**overrides, "dp": 4})
    plan = resolve(config)
    assert resolve(load_frozen(freeze(config, plan))).data == plan.data


def test_all_ranks_together_send_2_n_minus_1_times_the_gradients():
    plan = tiny_plan({"dp": 5, "global_batch": 20, "model.vocab": 37, **RING})
    _, table = traffic_of(plan)
    (sent,) = [row for row in table if row.operation == "send"]
    assert sent.total_payload_bytes == 2 * (5 - 1) * plan.spec.num_parameters * 4


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
