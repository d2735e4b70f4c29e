"""The predicted time of a step: its parts, its bounds, and published measurements."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parallelrun.planner.contract.collective import Collective
from parallelrun.planner.predict.cluster_cost import peak_flops
from parallelrun.planner.predict.step_time import blocks, spread, step
from parallelrun.planner.predict.step_time.kernels import product_s
from parallelrun.planner.predict.step_time.links import collective_s
from parallelrun.planner.predict.step_time.rates import rates_of
from parallelrun.planner.predict.step_time.step import step_time, why_unknown
from tests.unit.config.test_presets import composed
from tests.unit.config.test_presets import plan as planned

CLUSTER = composed("cluster=a100_dgx").config.cluster
RATES = rates_of(CLUSTER, "bf16")
assert RATES is not None
LARGE = ("model=gpt3_175b", "strategy=ptdp", "precision=bf16", "cluster=a100_dgx", "recompute=full")
PLANS = {
    "one device": ("model=gpt2_124m", "strategy=single", "precision=bf16", "cluster=a100_dgx"),
    "ddp": ("model=gpt2_124m", "strategy=ddp", "dp=64", "precision=bf16", "cluster=a100_dgx"),
    "fsdp": ("model=llama2_13b", "strategy=fsdp", "dp=64", "precision=bf16", "cluster=h100_dgx"),
    "tensor parallel": (*LARGE, "tp=8"),
    "sequence parallel": (*LARGE, "tp=8", "strategy.tensor.sequence_parallel=true"),
    "2D": ("model=gpt3_13b", "strategy=tp2d", "tp=16", "precision=bf16", "cluster=a100_dgx"),
    "3D": ("model=gpt3_13b", "strategy=tp3d", "tp=8", "precision=bf16", "cluster=a100_dgx"),
    "pipeline": (*LARGE, "tp=8", "pp=16", "dp=4", "global_batch=512", "micro_batch=1"),
    "interleaved": (*LARGE, "tp=8", "pp=8", "schedule=interleaved", "virtual_stages=4", "global_batch=64"),
    "experts": ("model=mixtral_8x7b", "strategy=dropless", "dp=16", "ep=8", "precision=bf16", "cluster=h100_dgx"),
}  # fmt: skip


def with_stack(plan, **settings):
    """The plan of a program that differs from this one in some settings."""
    return replace(plan, stack=replace(plan.stack, **settings))


def predicted(*overrides: str, **settings: object):
    found = step_time(with_stack(planned(*overrides), **settings), composed(*overrides).config.cluster)
    assert found is not None
    return found


@pytest.mark.parametrize("name", PLANS)
def test_the_parts_add_up_and_no_device_is_faster_than_its_peak(name):
    found = predicted(*PLANS[name])
    assert sum(found.parts.values()) == pytest.approx(found.step_s, rel=1e-12)
    assert all(seconds > 0 for seconds in found.parts.values())
    assert 0 < found.mfu < 1 and found.p10_s < found.step_s < found.p90_s


def test_the_peak_is_that_of_the_workers_and_tokens_are_shared_by_all_nodes():
    words = ("model=gpt2_124m", "strategy=ps", "dp=3", "servers=2", "cluster=ethernet_25g", "precision=fp16",
             "cluster.memory_gb_s=900", "global_batch=48")  # fmt: skip
    found, plan, cluster = predicted(*words), planned(*words), composed(*words).config.cluster
    peak = peak_flops(cluster, "fp16")
    assert peak is not None and (plan.num_workers, plan.world) == (3, 5)
    flops = 3 * plan.spec.forward_flops * 48
    assert found.mfu == pytest.approx(flops / (found.step_s * 3 * peak), rel=1e-12)
    assert found.tokens_per_s_per_gpu == pytest.approx(48 * 1024 / found.step_s / 5, rel=1e-12)


def test_parts_are_named_by_what_the_plan_does():
    assert (
        not {spread.BUBBLE, spread.DATA, blocks.TENSOR, spread.RECOMPUTE} & predicted(*PLANS["one device"]).parts.keys()
    )
    assert spread.DATA in predicted(*PLANS["ddp"]).parts
    assert {spread.BUBBLE, spread.PIPELINE, blocks.TENSOR, spread.RECOMPUTE} <= predicted(
        *PLANS["pipeline"]
    ).parts.keys()


@pytest.mark.parametrize("name", ["2D", "pipeline", "interleaved", "experts"])
def test_the_parts_are_the_time_in_which_ranks_work(name):
    """The schedule is simulated with whole stages, apart from their parts."""
    plan, cluster = planned(*PLANS[name]), composed(*PLANS[name]).config.cluster
    model = step.StepModel(cluster)
    stages, messages = model.stages(plan), model.messages(plan)
    _, busy, _ = step._schedule(plan, cluster, stages, messages)
    count = plan.batch.microbatches
    assert sum(step._parts_of(plan, stages).values()) + messages * count == pytest.approx(busy, rel=1e-12)


def test_experts_send_their_rows_in_every_pass():
    plan, cluster = planned(*PLANS["experts"]), composed(*PLANS["experts"]).config.cluster
    rates = rates_of(cluster, "bf16")
    rows = plan.expert.collectives(plan.spec.blocks, plan)
    seconds = sum(collective_s(row, plan, cluster, rates) for row in rows)
    assert seconds > 0 and predicted(*PLANS["experts"]).parts[blocks.EXPERT] == pytest.approx(
        plan.stack.expert_imbalance * seconds, rel=1e-9
    )


def test_attention_without_a_causal_mask_is_twice_the_work():
    shape = ("strategy=single", "precision=bf16", "cluster=a100_dgx", "model.layers=2", "model.hidden=1024",
             "model.heads=16", "model.seq=8192", "model.vocab=1024", "micro_batch=1", "global_batch=1")  # fmt: skip
    gpt, bert = (predicted(f"model={model}", *shape).parts[blocks.ATTENTION] for model in ("gpt", "bert"))
    assert bert > 1.5 * gpt


def test_a_product_fills_whole_waves_of_tiles():
    """One more row of tiles than multiprocessors costs another wave."""
    full = product_s(128 * RATES.multiprocessors, 4096, 128, 2, RATES)
    assert product_s(128 * RATES.multiprocessors + 1, 4096, 128, 2, RATES) > 1.4 * full


def test_a_hidden_size_off_the_alignment_is_slower_though_smaller():
    """BLOOM: hidden 14,400 over 8 ranks ran slower than 13,824 (reference: BigScience's chronicles)."""
    per_flop = [product_s(4096, hidden, hidden // 8, 2, RATES) / hidden**2 for hidden in (13824, 14400)]
    assert per_flop[1] > 1.1 * per_flop[0]


def test_a_group_across_nodes_uses_the_ports_of_all_its_ranks_on_a_node():
    """Two nodes of 8 ranks sum within the node, and each rank an eighth between nodes, half beside each other."""
    plan = planned(*LARGE, "tp=8", "dp=2")
    row = Collective("dp", "all_reduce", "gradients", 1, 10**9)
    alone = collective_s(row, plan, CLUSTER, RATES)
    assert alone == pytest.approx(10**9 / RATES.inter_bytes_s + RATES.collective_s + 2 * RATES.message_s)
    whole = collective_s(replace(row, axis="world"), plan, CLUSTER, RATES)
    inside, between = 2 * 7 / 8 * 10**9 / RATES.intra_bytes_s, 10**9 / (8 * RATES.inter_bytes_s)
    latency = RATES.collective_s + 2 * (RATES.message_s + 7 * RATES.hop_s)
    assert whole == pytest.approx(inside + between / 2 + latency)


@pytest.mark.parametrize(
    ("operation", "rate", "ports"),  # rate: of a link inside a node; ports: of a node that carry a rank's data
    [("all_gather", 0.9, 8), ("reduce_scatter", 0.9, 8), ("all_to_all", 1.0, 1)],
)
@pytest.mark.parametrize("inter", [0.2, 5.0])
def test_what_a_tensor_parallel_group_of_two_nodes_takes(operation, rate, ports, inter):
    """The faster of two ways: a ring; or 7/8 inside a node, and half between the two, half of the shorter beside.

    A ring of 16 has 14 links inside nodes, of which a piece of data skips one, and 2 between nodes.
    """
    plan, row = planned(*LARGE, "tp=16"), Collective("tp", operation, "", 3, 10**9)
    rates = replace(RATES, inter_bytes_s=inter * RATES.inter_bytes_s)
    link, port = rate * rates.intra_bytes_s / 10**9, ports * rates.inter_bytes_s / 10**9
    within, across, ring = 7 / 8 / link, 1 / 2 / port, 15 / 16 / min(link, port)
    latency = 3 * (rates.collective_s + 2 * rates.message_s + 13 * rates.hop_s)
    expected = min(ring, max(within, across) + min(within, across) / 2)
    assert collective_s(row, plan, CLUSTER, rates) == pytest.approx(expected + latency)
    alone = within + 3 * (rates.collective_s + 7 * rates.hop_s)
    assert collective_s(row, planned(*LARGE, "tp=8"), CLUSTER, rates) == pytest.approx(alone), "one node"


def test_gradients_travel_under_the_backward_pass():
    hidden, apart = (predicted(*PLANS["ddp"], data_overlap=overlapped) for overlapped in (True, False))
    assert hidden.parts[spread.DATA] < apart.parts[spread.DATA]
    assert {**hidden.parts, spread.DATA: 0} == {**apart.parts, spread.DATA: 0}


def test_recomputation_repeats_the_forward_pass_of_the_layers():
    without = predicted(*LARGE[:-1], "tp=8")
    found = predicted(*LARGE, "tp=8")
    assert found.step_s - without.step_s == pytest.approx(found.parts[spread.RECOMPUTE], rel=1e-3)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (("model=gpt", "cluster=laptop"), "cluster.memory_gb_s is not given"),
        (
            ("model=gpt", "cluster=local"),
            "cluster.peak_tflops.fp32, cluster.memory_gb_s and cluster.intra_gb_s are not given",
        ),
        (("model=gpt", "dp=16", "cluster=a100_dgx", "cluster.inter_gb_s=null"), "cluster.inter_gb_s is not given"),
        (("model=gpt", "strategy=ps", "dp=2", "servers=1", "cluster=a100_dgx"), "parameter servers"),
        (("model=resnet50", "strategy=ddp", "dp=2", "cluster=a100_dgx"), "cluster.convolution_efficiency is not given"),
    ],
)
def test_what_cannot_be_predicted_is_said(overrides, reason):
    plan, cluster = planned(*overrides), composed(*overrides).config.cluster
    assert step_time(plan, cluster) is None and reason in why_unknown(plan, cluster)
