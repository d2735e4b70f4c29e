"""Seconds of collectives and messages over the links of a cluster, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parallelrun.planner.contract.collective import Collective
from parallelrun.planner.predict.step_time import step
from parallelrun.planner.predict.step_time.links import bytes_s, collective_s
from parallelrun.planner.predict.step_time.rates import absent
from tests.unit.config.test_presets import plan as planned
from tests.unit.planner.predict.step_time.test_block_time import LINEAR
from tests.unit.planner.predict.step_time.test_step_time import CLUSTER, LARGE

ROW = Collective("dp", "all_reduce", "gradients", 1, 10**9)


def test_the_host_with_the_fewest_ranks_decides():
    """11 ranks, 8 of them on the first host: a ring, at the rate of the three ports of the second."""
    ports = 3 * LINEAR.inter_bytes_s
    assert bytes_s(ROW, 11, 3, LINEAR) == pytest.approx(2 * 10 / 11 * 10**9 / min(ports, LINEAR.intra_bytes_s))


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "all_to_all"])
def test_ports_are_slower_the_more_nodes_the_network_connects(operation):
    """By a congestion of a half, those between 16 nodes have a quarter of their rate, whatever a node's ranks."""
    row, quarter = replace(ROW, operation=operation), replace(LINEAR, inter_bytes_s=LINEAR.inter_bytes_s / 4)
    for in_node in (1, 8):
        congested = bytes_s(row, 16 * in_node, in_node, replace(LINEAR, congestion=0.5))
        assert congested == pytest.approx(bytes_s(row, 16 * in_node, in_node, quarter))


@pytest.mark.parametrize(("inter", "seconds"), [(0.1, 10.0), (1.0, 1.0), (4.0, 1.0)])
def test_a_message_is_no_faster_than_the_slower_of_both_links(inter, seconds):
    rates = replace(LINEAR, intra_bytes_s=1e9, inter_bytes_s=inter * 1e9)
    plan = planned(*LARGE, "tp=8", "pp=4")
    assert collective_s(Collective("pp", "send", "", 1, 10**9), plan, CLUSTER, rates) == pytest.approx(seconds)


def test_the_rate_between_nodes_is_needed_from_the_first_rank_of_a_second_one():
    lacking = replace(CLUSTER, inter_gb_s=None, gpus_per_node=8)
    assert [absent(lacking, "bf16", world) for world in (1, 8, 9)] == [(), (), ("inter_gb_s",)]


@pytest.mark.parametrize("kind", ["local_sgd", "diloco"])
def test_replicas_that_meet_every_fourth_step_communicate_a_quarter_of_the_time(kind):
    words = "model=gpt2_124m", f"strategy={kind}", "dp=8", "precision=bf16", "cluster=a100_dgx"
    always, rarely = (
        step._data(planned(*words, f"strategy.data.sync_every={every}"), CLUSTER, LINEAR) for every in (1, 4)
    )
    assert always.sums > 0 and rarely.sums == pytest.approx(always.sums / 4)
