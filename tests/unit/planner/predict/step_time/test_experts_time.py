"""The time of layers with experts: products by their shapes, rows in order, all-to-alls inside and across hosts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parallelrun.planner.predict import simulate
from parallelrun.planner.predict.step_time import blocks, experts, pairs
from parallelrun.planner.predict.step_time.blocks import block_time
from parallelrun.planner.predict.step_time.kernels import product_s
from parallelrun.planner.predict.step_time.links import collective_s
from parallelrun.planner.predict.step_time.overlap import SLOWED
from parallelrun.planner.predict.step_time.rates import rates_of
from parallelrun.planner.predict.step_time.step import step_time
from tests.unit.config.test_presets import composed
from tests.unit.config.test_presets import plan as planned
from tests.unit.planner.predict.step_time.test_step_time import with_stack

CLUSTER = composed("cluster=h100_dgx").config.cluster
RATES = rates_of(CLUSTER, "bf16")
MIXTRAL = ("model=mixtral_8x7b", "model.seq=4096", "precision=bf16", "cluster=h100_dgx", "strategy=dropless",
           "global_batch=64", "micro_batch=1")  # fmt: skip
EVEN = {"expert_imbalance": 1.0}


@pytest.mark.parametrize(
    ("words", "rows", "matrix"),
    [
        (("dp=8", "ep=8"), 4096 * 2, (1, 14336, 4096)),  # tokens x top_k x ep / experts
        (("dp=8", "ep=2"), 4096 * 2 / 4, (4, 14336, 4096)),
        (("dp=8", "ep=1"), 4096 * 2 / 8, (8, 14336, 4096)),
        (("dp=8", "ep=4", "tp=2"), 4096 * 2 / 2, (2, 7168, 4096)),  # all tokens, a half of each expert
    ],
)
def test_rows_and_matrices_of_a_ranks_experts(words, rows, matrix):
    plan = planned(*MIXTRAL, *words)
    found = experts.shapes(plan.spec.blocks[1], plan)
    assert found.rows == pytest.approx(rows) and found.matrices[0] == found.matrices[1] == matrix
    assert found.matrices[2] == (matrix[0], matrix[2], matrix[1])
    dense = planned("model=llama3_8b")
    assert experts.shapes(dense.spec.blocks[1], dense) is None


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_pass_hides_the_all_to_alls_of_another_where_they_take_turns(recompute):
    """Half of those of a backward pass with recomputation: it waits twice as often as a forward pass."""
    words = (*MIXTRAL, "pp=4", "dp=8", "ep=8", "cluster.gpus_per_node=1", "strategy.expert.chunks=1")
    found = {}
    for schedule in ("zbv", "dualpipev"):
        config = composed(*words, f"schedule={schedule}", f"recompute={recompute}").config
        found[schedule] = step_time(planned(*words, f"schedule={schedule}", f"recompute={recompute}"), config.cluster)
    assert sum(found["dualpipev"].parts.values()) == pytest.approx(found["dualpipev"].step_s)
    alone, turns = (found[schedule].parts[blocks.EXPERT] for schedule in ("zbv", "dualpipev"))
    assert 0 < turns < alone and (recompute == "full" or found["dualpipev"].step_s < found["zbv"].step_s)
    forward, backward = pairs.PassTime(3.0, 1.0, 2), pairs.PassTime(8.0, 2.0, 2 if recompute == "none" else 4)
    stages = [(forward, backward)] * 8
    paired = pairs.times(stages, planned(*words, "schedule=dualpipev"))
    assert paired[simulate.PAIRED["F"]] == pytest.approx([3.0 - 1.0 + SLOWED] * 8)
    hidden = 2.0 if recompute == "none" else 1.0
    assert paired[simulate.PAIRED["B"]] == pytest.approx([8.0 - (1 - SLOWED) * hidden] * 8)


def test_few_rows_an_expert_take_as_long_as_reading_its_weights():
    """With ep=1 each of 8 experts gets a row: 8 times the weights of ep=8 are read for as many FLOPs."""
    few = ("model.seq=4", "micro_batch=1")
    times = []
    for ep in (1, 8):
        plan = with_stack(planned(*MIXTRAL[:1], *MIXTRAL[2:6], "dp=8", f"ep={ep}", *few), **EVEN)
        times.append(
            experts.products_s(experts.shapes(plan.spec.blocks[1], plan), plan, replace(RATES, kernel_s=0.0))[0]
        )
    weights = 3 * 14336 * 4096 * 2 / RATES.memory_bytes_s / experts.OF_GROUPED
    assert times[0] == pytest.approx(8 * weights, rel=0.01) and weights < times[1] < 2 * weights


def test_products_are_grouped_and_wait_for_the_rank_with_most_rows():
    plan = with_stack(planned(*MIXTRAL, "dp=8", "ep=8"), **EVEN)
    found = experts.shapes(plan.spec.blocks[1], plan)
    forward, backward = experts.products_s(found, plan, RATES)
    alone = product_s(8192, 4096, 14336, 2, RATES), product_s(8192, 14336, 4096, 2, RATES)
    assert forward == pytest.approx((2 * alone[0] + alone[1]) / 0.85) and 1.9 * forward < backward < 2.2 * forward
    faster = replace(RATES, fp8=replace(RATES, peak_flops=2 * RATES.peak_flops))
    assert experts.products_s(found, with_stack(plan, fp8="all"), faster)[0] == pytest.approx(forward / 2, rel=0.02)
    assert experts.products_s(found, plan, faster) == (forward, backward)
    uneven = experts.products_s(found, with_stack(plan, expert_imbalance=1.5), RATES)
    assert uneven[0] == pytest.approx(1.5 * forward, rel=0.05)
    held = with_stack(planned(*MIXTRAL, "dp=8", "ep=1"), expert_imbalance=1.5)
    own = experts.shapes(held.spec.blocks[1], held)
    assert experts.products_s(own, held, RATES) == experts.products_s(own, with_stack(held, **EVEN), RATES)


@pytest.mark.parametrize(
    ("per_node", "top_k", "groups", "share"),
    [
        (8, 2, (1, 1), 1.0),  # one host
        (2, 2, (1, 1), 4 * (1 - (3 / 4) ** 2) / 2),  # two choices among four hosts
        (2, 4, (1, 1), 4 * (1 - (3 / 4) ** 4) / 4),
        (2, 4, (4, 2), 2 / 4),  # limited to two of four groups of experts, which are hosts
    ],
)
def test_a_row_that_is_sent_once_to_each_host(per_node, top_k, groups, share):
    router = f"model.router.top_k={top_k}", f"model.router.n_group={groups[0]}", f"model.router.topk_group={groups[1]}"
    plan, cluster = planned(*MIXTRAL, *router, "dp=8", "ep=8"), replace(CLUSTER, gpus_per_node=per_node)
    row = plan.expert.collectives((plan.spec.blocks[1],), plan)[0]
    assert experts.sent(row, plan, cluster) == 1.0
    once = with_stack(plan, rows_once_a_host=True)
    assert experts.sent(row, once, cluster) == pytest.approx(share)
    fast = replace(RATES, collective_s=0.0, hop_s=0.0, message_s=0.0, intra_bytes_s=1e18)
    whole, part = (collective_s(row, plan, cluster, fast, crossing) for crossing in (1.0, share))
    assert part == pytest.approx(share * whole) or per_node == 8


def test_all_to_alls_hide_under_other_layers_as_far_as_the_program_overlaps_them():
    plan = planned(*MIXTRAL, "dp=8", "ep=8")
    none, half, whole = (
        block_time(plan.spec.blocks[1], with_stack(plan, expert_overlap=part), CLUSTER, RATES).forward[blocks.EXPERT]
        for part in (0.0, 0.5, 1.0)
    )
    assert half == pytest.approx((none + whole) / 2) and whole == pytest.approx(0.1 * none)
    even = block_time(plan.spec.blocks[1], with_stack(plan, **EVEN), CLUSTER, RATES).forward[blocks.EXPERT]
    assert none == pytest.approx(1.25 * even)


@pytest.mark.parametrize(
    ("computed", "beside", "chunks", "exposed"),
    [(8, 0, 1, 4), (8, 1, 1, 3), (8, 5, 1, 2), (8, 0, 2, 2), (8, 0, 4, 1), (2, 0, 2, 2), (0, 0, 2, 4)],
)
def test_chunks_and_the_shared_expert_hide_all_to_alls_of_four_seconds(computed, beside, chunks, exposed):
    assert experts.exposed_s(4.0, computed, beside, chunks) == pytest.approx(exposed)


def test_a_layer_hides_its_all_to_alls_in_chunks_whose_weights_gradients_are_added():
    words = ("model=deepseek_v2_lite", *MIXTRAL[2:-1], "micro_batch=8", "dp=8", "ep=8")
    times = {}
    for name, more in (("apart", ("overlap=false",)), ("one", ()), ("four", ("chunks=4",))):
        plan = planned(*words, *(f"strategy.expert.{key}" for key in more))
        times[name] = block_time(plan.spec.blocks[2], plan, CLUSTER, RATES)
    for part in ("forward", "backward"):
        sent = [getattr(times[name], part)[blocks.EXPERT] for name in times]
        assert sent[0] > 1.02 * sent[1] and sent[1] > 1.5 * sent[2], part
    products = [times[name].forward[blocks.PRODUCTS] for name in ("one", "four")]
    assert products[0] <= products[1] < 1.2 * products[0]
    held = 3 * 64 * 2048 * 1408 / 8  # of the weights of a rank's experts, each of whose sums moves 6 bytes
    more = times["four"].backward[blocks.MEMORY_BOUND] - times["one"].backward[blocks.MEMORY_BOUND]
    assert more == pytest.approx(3 * 6 * held / RATES.memory_bytes_s)
