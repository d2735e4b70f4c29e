"""What the predicted time of a step makes of what other programs do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import foresight
from parallelrun.planner.predict.step_time import blocks, host, spread, step
from parallelrun.planner.predict.step_time.blocks import block_time
from parallelrun.planner.predict.step_time.links import collective_s, copies_s, sharing_s
from parallelrun.planner.predict.step_time.rates import rates_of
from parallelrun.planner.predict.step_time.step import _sent
from tests.unit.config.test_presets import composed
from tests.unit.planner.predict.step_time.test_step_time import CLUSTER, RATES, planned, predicted, with_stack

SMALL = ("model=gpt2_124m", "precision=bf16", "cluster=a100_dgx", "micro_batch=1", "global_batch=8")
TENSOR = (*SMALL, "strategy=tp", "tp=4")
DDP = (*SMALL[:-1], "global_batch=64", "strategy=ddp", "dp=64")
H100 = composed("cluster=h100_dgx").config.cluster
ZERO = ("model=gpt3_13b", "strategy=zero1", "dp=64", "precision=bf16", "cluster=a100_dgx")


def test_a_host_waits_while_the_ranks_of_a_group_compare_what_they_call():
    plan = planned(*TENSOR)
    calls = sum(one.row.calls for block in plan.spec.blocks for one in plan.tensor.traffic(block, plan))
    checking = with_stack(plan, checked_collectives=True)
    least = plan.batch.microbatches * calls * host.check_s(4, checking)
    plain, checked = predicted(*TENSOR), predicted(*TENSOR, checked_collectives=True)
    assert least <= checked.step_s <= least + plain.step_s
    assert checked.parts[blocks.HOST] > plain.parts[blocks.HOST] + least / 2
    assert host.check_s(16, checking) == 4 * host.check_s(4, checking) and not host.check_s(16, plan)


def test_checks_before_buckets_are_hidden_by_nothing():
    plan = planned(*DDP)
    calls = sum(row.calls for row in plan.data.collectives(0, plan.mesh.coordinate(0), plan))
    plain, checked = predicted(*DDP), predicted(*DDP, checked_collectives=True)
    added = checked.parts[spread.DATA] - plain.parts[spread.DATA]
    assert added == pytest.approx(calls * host.check_s(64, with_stack(plan, checked_collectives=True)))


def test_gradients_that_one_all_reduce_sums_after_backward_are_all_exposed():
    plan = planned(*ZERO)
    rows = plan.data.collectives(0, plan.mesh.coordinate(0), plan)
    sent = [_sent(row, with_stack(plan, whole_sums=True)) for row in rows]
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
    row = {"set": "nanotron-H100", "name": "", "pp": "2", "N": "16", "tp": "4"} | changes
    assert ("stack.checked_collectives=true" in foresight.stack_of(row)) is checked and foresight.kind_of(row) == kind


def test_fsdp_copies_weights_out_of_and_gradients_into_buffers_that_hide_nothing():
    """Per gather a weight of 2 bytes is read and written; per sum a gradient of 2 is read, one of 4 written."""
    words = ("model=llama3_8b", "strategy=fsdp", "dp=8", "precision=bf16", "cluster=h100_dgx",
             "global_batch=16")  # fmt: skip
    plan, rates = planned(*words), replace(RATES, memory_bytes_s=1.0, intra_bytes_s=1.0)
    weights = plan.spec.num_parameters
    rows = {row.operation: row for row in plan.data.collectives(0, plan.mesh.coordinate(0), plan)}
    for operation, num_bytes in (("all_gather", 4), ("reduce_scatter", 6)):
        row = rows[operation]
        times = row.payload_bytes / weights / (2 if operation == "all_gather" else 4)  # microbatches, passes
        assert copies_s(row, plan, rates) == pytest.approx(times * num_bytes * weights, rel=0.01)
        assert not copies_s(row, with_stack(plan, copied_buffers=False), rates)
        fp8, copied = replace(rates, fp8=rates), with_stack(plan, fp8_copies=True)
        assert copies_s(row, plan, fp8) == copies_s(row, plan, rates)
        in_fp8 = copies_s(row, copied, fp8) - copies_s(row, copied, rates)
        assert in_fp8 == pytest.approx(3 * row.payload_bytes * (operation == "all_gather"))
        assert sharing_s(row, plan, rates) == pytest.approx((0.15 + 2) * row.payload_bytes * 7 / 8)
    exposed = [predicted(*words, copied_buffers=value).parts[spread.DATA] for value in (True, False)]
    assert exposed[0] > 1.2 * exposed[1]
    zero = planned(*words[:1], "strategy=zero1", *words[2:])
    assert not any(copies_s(row, zero, rates) for row in zero.data.collectives(0, zero.mesh.coordinate(0), zero))


def test_per_operation_recomputation_repeats_every_second_product_and_all_that_is_none():
    words = ("model=llama3_8b", "strategy=fsdp", "dp=8", "precision=bf16", "cluster=h100_dgx", "global_batch=16",
             "recompute=selective")  # fmt: skip
    plan = planned(*words)
    block = plan.spec.blocks[1]
    time = block_time(block, with_stack(plan, selective="products"), CLUSTER, RATES)
    share = (1024 + 4096 + 14336) / (2 * (1024 + 4096) + 3 * 14336)  # of wk, wo and the up projection, 4,096 wide
    assert time.again[blocks.PRODUCTS] / time.forward[blocks.PRODUCTS] == pytest.approx(share)
    assert time.again[blocks.MEMORY_BOUND] == time.forward[blocks.MEMORY_BOUND]
    attention = block_time(block, with_stack(plan, selective="attention"), CLUSTER, RATES)
    assert attention.again.keys() - {blocks.HOST} == {blocks.ATTENTION}


def test_linear_layers_of_blocks_multiply_in_fp8_and_round_their_operands():
    words = ("model=llama3_8b", "dp=8", "cluster=h100_dgx", "global_batch=64", "micro_batch=1", "device=cuda")
    own = planned(*words, "precision=fp8")
    words = (*words, "stack.fp8_copies=true")
    plans = {name: planned(*words, f"precision={name}") for name in ("bf16", "fp8")}
    times = {name: step.StepModel(H100) for name in plans}
    block, head = ({n: times[n].block_time(plans[n], plans[n].spec.blocks[i]) for n in plans} for i in (1, -1))
    assert head["fp8"] == head["bf16"] and block["fp8"].forward["attention"] == block["bf16"].forward["attention"]
    for part, columns in (("forward", 3 * 4096 + 14336), ("backward", 6144 + 4096 + 2 * 14336 + 4096)):
        fp8, bf16 = (getattr(block[name], part) for name in ("fp8", "bf16"))
        assert bf16[blocks.PRODUCTS] / fp8[blocks.PRODUCTS] == pytest.approx(1979 / 989 * 0.88, rel=0.02)
        cast = 8192 * columns * 6 / (3350e9 * H100.memory_efficiency)
        assert fp8[blocks.MEMORY_BOUND] - bf16[blocks.MEMORY_BOUND] == pytest.approx(cast, rel=0.02)
    operands = sum((8192 + n) * k for k, n in ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096)))
    added = step.StepModel(H100).block_time(own, own.spec.blocks[1]).forward[blocks.MEMORY_BOUND]
    added -= block["bf16"].forward[blocks.MEMORY_BOUND]
    assert added == pytest.approx(
        9 * operands / (3350e9 * H100.memory_efficiency), rel=0.02
    )  # rounded as they are read
    sharded = times["fp8"].block_time(planned(*words, "precision=fp8", "strategy=fsdp"), plans["fp8"].spec.blocks[1])
    assert sharded.forward[blocks.MEMORY_BOUND] < block["fp8"].forward[blocks.MEMORY_BOUND], "a search's lower bound"
    found = [step.step_time(plan, H100) for plan in plans.values()]
    assert found[1].step_s < 0.85 * found[0].step_s and found[1].mfu < found[0].mfu
    assert rates_of(replace(H100, peak_tflops={"fp8": 1979.0}), "fp8") is None and not rates_of(CLUSTER, "fp8")


def test_async_tensor_parallelism_hides_its_part():
    words = ("model=llama3_70b", "tp=8", "strategy.tensor.sequence_parallel=true", "precision=bf16",
             "cluster=h100_dgx", "global_batch=8", "micro_batch=8")  # fmt: skip
    none, half, whole = (
        predicted(*words, tensor_overlap=part, gradient_overlap=False).parts[blocks.TENSOR] for part in (0.0, 0.5, 1.0)
    )
    assert half == pytest.approx((none + whole) / 2, rel=0.02) and whole < 0.2 * none
