"""What the predicted time of a step makes of what other programs do."""

from __future__ import annotations

import pytest

from benchmarks import foresight, stacks
from parallelrun.planner.predict.step_time import blocks, host, spread
from parallelrun.planner.predict.step_time.links import collective_s
from parallelrun.planner.predict.step_time.stack import OURS, SoftwareStack
from parallelrun.planner.predict.step_time.step import _sent
from tests.unit.planner.predict.step_time.test_step_time import CLUSTER, RATES, planned, predicted

CHECKED = SoftwareStack(checked_collectives=True)
SMALL = ("model=gpt2_124m", "precision=bf16", "cluster=a100_dgx", "micro_batch=1", "global_batch=8")
TENSOR = (*SMALL, "strategy=tp", "tp=4")
DDP = (*SMALL[:-1], "global_batch=64", "strategy=ddp", "dp=64")
ZERO = ("model=gpt3_13b", "strategy=zero1", "dp=64", "precision=bf16", "cluster=a100_dgx")


def test_a_host_waits_while_the_ranks_of_a_group_compare_what_they_call():
    plan = planned(*TENSOR)
    calls = sum(one.row.calls for block in plan.spec.blocks for one in plan.tensor.traffic(block, plan))
    least = plan.batch.microbatches * calls * host.check_s(4, CHECKED)
    plain, checked = predicted(*TENSOR), predicted(*TENSOR, checked_collectives=True)
    assert least <= checked.step_s <= least + plain.step_s
    assert checked.parts[blocks.HOST] > plain.parts[blocks.HOST] + least / 2
    assert host.check_s(16, CHECKED) == 4 * host.check_s(4, CHECKED) and not host.check_s(16, OURS)


def test_checks_before_buckets_are_hidden_by_nothing():
    plan = planned(*DDP)
    calls = sum(row.calls for row in plan.data.collectives(0, plan.mesh.coordinate(0), plan))
    plain, checked = predicted(*DDP), predicted(*DDP, checked_collectives=True)
    added = checked.parts[spread.DATA] - plain.parts[spread.DATA]
    assert added == pytest.approx(calls * host.check_s(64, CHECKED))


def test_gradients_that_one_all_reduce_sums_after_backward_are_all_exposed():
    plan = planned(*ZERO)
    rows = plan.data.collectives(0, plan.mesh.coordinate(0), plan)
    sent = [_sent(row, plan, SoftwareStack(whole_sums=True)) for row in rows]
    late = [one for one in sent if one.operation == "all_reduce"]
    assert [one.payload_bytes for one in late] == [r.payload_bytes for r in rows if r.operation == "reduce_scatter"]
    assert all(one.calls == 1 for one in sent)
    seconds = sum(collective_s(one, plan, CLUSTER, RATES) for one in late)
    assert predicted(*ZERO, whole_sums=True).parts[spread.DATA] > seconds > 2 * predicted(*ZERO).parts[spread.DATA]
    assert predicted(*DDP, whole_sums=True).parts == predicted(*DDP).parts, "its gradients are summed in backward"


def test_operations_around_split_products_are_issued_only_where_products_are_split():
    more = {"tensor_operations": (40, 42)}
    assert predicted(*TENSOR, **more).parts[blocks.HOST] > predicted(*TENSOR).parts[blocks.HOST]
    whole = (*SMALL, "strategy=single")
    assert predicted(*whole, **more).parts == predicted(*whole).parts


@pytest.mark.parametrize(
    ("changes", "checked", "kind"),
    [
        ({}, True, "stages over nodes"), ({"pp": "1"}, False, ""), ({"N": "8"}, False, ""),
        ({"set": "MCore-H100"}, False, ""), ({"tp": "16"}, True, "tp > 8"),
    ],
)  # fmt: skip
def test_nanotrons_runs_with_stages_on_several_nodes_checked_their_collectives(changes, checked, kind):
    row = {"set": "nanotron-H100", "pp": "2", "N": "16", "tp": "4"} | changes
    assert stacks.stack_of(row).checked_collectives is checked and foresight.kind_of(row) == kind
