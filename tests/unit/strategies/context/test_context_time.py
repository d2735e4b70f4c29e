"""The time and the screens of plans with cp."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from parallelrun.planner.facts.document import context, document
from parallelrun.planner.memory import peak
from parallelrun.planner.predict import prediction
from parallelrun.planner.predict.simulate import stage_flops
from parallelrun.planner.predict.step_time.blocks import ATTENTION, CONTEXT
from parallelrun.planner.predict.step_time.links import collective_s
from parallelrun.planner.predict.step_time.rates import rates_of
from parallelrun.planner.predict.step_time.step import StepModel
from tests.plans import tiny_config, tiny_plan

KIND, ORDER = "strategy.context.kind", "strategy.context.order"
LONG = {"model.seq": 65536, "model.hidden": 1024, "model.heads": 8, "precision.name": "bf16", "global_batch": 2}
CLUSTER = {
    "cluster.gpus_per_node": 8, "cluster.peak_tflops": 989.0, "cluster.memory_gb_s": 3350.0,
    "cluster.intra_gb_s": 450.0, "cluster.memory_gb": 80.0,
}  # fmt: skip


def time_of(**changed: Any):
    overrides = {
        **LONG,
        **CLUSTER,
        "device": "cuda",
        **{key.replace("__", "."): value for key, value in changed.items()},
    }
    plan = tiny_plan(overrides)
    found = StepModel(tiny_config(overrides).cluster).block_time(plan, plan.spec.blocks[1])
    assert found is not None
    return found


def test_attention_is_divided_and_the_slowest_rank_counts():
    alone, four = time_of(), time_of(cp=4)
    assert four.forward[ATTENTION] == pytest.approx(alone.forward[ATTENTION] / 4, rel=0.01)
    contiguous = time_of(**{"cp": 4, ORDER: "contiguous"})
    assert contiguous.forward[ATTENTION] / four.forward[ATTENTION] == pytest.approx(1.75, rel=0.01)
    assert sum(four.forward.values()) < sum(alone.forward.values()) / 2  # products shrink too


def test_a_ring_sends_under_attention_and_the_others_wait():
    plan = tiny_plan({**LONG, "cp": 4})
    assert plan.context.exposed_s(1.0, 10.0, plan) == pytest.approx(0.1)  # what it hides slows attention down
    assert plan.context.exposed_s(4.0, 4.0, plan) > 1  # a fourth of attention is left when the last block comes
    ring, gathered = time_of(cp=4), time_of(**{"cp": 4, KIND: "allgather"})
    assert 0 < ring.forward[CONTEXT] < gathered.forward[CONTEXT]


@pytest.mark.parametrize("kind", ["ulysses", "allgather"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_all_predicted_messages_of_a_block_take_their_time(kind, recompute):
    """Those of the second forward pass, too. Neither kind sends under attention."""
    words = {"cp": 4, KIND: kind, "recompute": recompute}
    found, plan = time_of(**words), tiny_plan({**LONG, **CLUSTER, **words, "device": "cuda"})
    cluster = tiny_config({**LONG, **CLUSTER}).cluster
    rows = plan.context.collectives(plan.spec.blocks[1:2], plan)
    seconds = sum(collective_s(row, plan, cluster, rates_of(cluster, "bf16")) for row in rows)
    passes = found.forward, found.backward, found.again
    assert sum(parts.get(CONTEXT, 0.0) for parts in passes) == pytest.approx(seconds / plan.batch.microbatches)


def test_blocks_of_other_orders_and_degrees_have_times_of_their_own():
    """One model of step times serves a whole search."""
    overrides = {**LONG, **CLUSTER, "device": "cuda"}
    model = StepModel(tiny_config(overrides).cluster)
    found = set()
    for more in ({}, {"cp": 2}, {"cp": 4}, {"cp": 4, ORDER: "contiguous"}, {"cp": 4, KIND: "ulysses"}):
        plan = tiny_plan({**overrides, **more})
        found.add(model.block_time(plan, plan.spec.blocks[1]).forward[ATTENTION])
    assert len(found) == 4  # zigzag and ulysses are both even


def test_a_rank_has_its_part_of_flops_tokens_and_activations():
    alone, four = tiny_plan(LONG), tiny_plan({**LONG, "cp": 4})
    assert stage_flops(four)[0] == pytest.approx(stage_flops(alone)[0] / 4)
    tokens = 2 * 2 * 65536 * 8  # inputs and targets of two samples
    assert peak.batch_bytes(alone, 0) - peak.batch_bytes(four, 0) == tokens * 3 // 4
    activations = [prediction.memory(plan, 0).activations for plan in (alone, four)]
    assert activations[1] == pytest.approx(activations[0] / 4, rel=0.05)


def test_the_document_says_the_imbalance_of_each_order():
    overrides = {"cp": 2, "dp": 2}
    plan = tiny_plan(overrides)
    found = context(plan)
    assert found["kind"] == "ring" and found["order"] == "zigzag" and found["positions"] == 4
    assert list(found["imbalance"]) == ["zigzag", "contiguous", "striped"]
    assert found["imbalance"]["contiguous"] > found["imbalance"]["zigzag"] >= 1
    whole = document(plan, tiny_config(overrides))
    assert whole["degrees"]["cp"] == 2 and whole["ranks"][3]["cp"] == 1 and whole["context"] == found
    assert context(tiny_plan()) is None and "cp" not in document(tiny_plan(), tiny_config())["ranks"][0]
    assert set(context(tiny_plan({**overrides, KIND: "ulysses"}))["imbalance"]) == {"contiguous"}


def test_an_order_that_does_not_divide_the_sequence_is_not_compared():
    plan = tiny_plan({"cp": 2, "model.seq": 6, ORDER: "striped"})
    assert "zigzag" not in context(replace(plan))["imbalance"]
