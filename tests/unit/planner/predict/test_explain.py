"""`parallelrun explain`: the messages that a strategy lists are the calls and bytes that it predicts."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest

from parallelrun.base.errors import ConfigError
from parallelrun.planner.contract.collective import Collective
from parallelrun.planner.contract.messages import Explanation, explain, rows
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.predict import prediction
from parallelrun.planner.predict.prediction import merge
from parallelrun.report.plans import explain as report
from parallelrun.strategies.data.common.allreduce.explain import explain_all_reduce
from parallelrun.strategies.data.common.allreduce.trees import TreeAllReduce
from tests.plans import tiny_plan

RING = {"strategy.data.kind": "ring", "strategy.data.bucket_mb": 0.005}
EXPERTS = {"model.experts": 4, "model.router.kind": "top_k", "model.router.top_k": 2}
PLANS: dict[str, dict[str, Any]] = {
    "ddp": {"dp": 4},
    "ddp of tied stages": {"dp": 2, "pp": 2, "microbatches": 2},
    "ring": {"dp": 4, **RING},
    "ring of three, tp, norms partial": {
        "dp": 3, "tp": 2, "global_batch": 12, "strategy.tensor.sequence_parallel": True, **RING},
    "halving-doubling of five": {"dp": 5, "global_batch": 10, **RING, "strategy.data.algorithm": "halving_doubling"},
    "hierarchical": {"dp": 4, **RING, "strategy.data.algorithm": "hierarchical", "strategy.data.group_size": 2},
    "tree of six": {"dp": 6, "global_batch": 12, **RING, "strategy.data.algorithm": "tree"},
    "process sets": {"dp": 4, "tp": 2, "strategy.data.kind": "horovod", "strategy.data.process_sets": [[0, 2, 3]]},
    "process sets, ring": {
        "dp": 4,
        "strategy.data.kind": "horovod",
        "strategy.data.algorithm": "ring",
        "strategy.data.process_sets": [[2, 0], [1]],
    },
    "process sets, adasum": {
        "dp": 4,
        "strategy.data.kind": "horovod",
        "strategy.data.reduction": "adasum",
        "strategy.data.process_sets": [[0, 3]],
    },
    "horovod": {"dp": 2, "strategy.data.kind": "horovod", "strategy.data.compression": "fp16"},
    "ranks of a sequence before fp16": {**RING, "dp": 2, "cp": 2, "strategy.data.compression": "fp16"},
    "ranks of ep before adasum": {
        **EXPERTS, "dp": 4, "ep": 2, "strategy.data.kind": "horovod", "strategy.data.reduction": "adasum"},
    "ranks of ep before local_sgd": {**EXPERTS, "dp": 4, "ep": 2, "strategy.data.kind": "local_sgd"},
    "ps": {"dp": 3, "servers": 2, "global_batch": 12, "strategy.data.kind": "ps", "strategy.data.shard_min_kb": 0},
    "async ps": {"dp": 2, "servers": 1, "strategy.data.kind": "ps", "consistency": "async"},
    "ranks of a worker of async ps": {
        **EXPERTS, "dp": 2, "cp": 2, "tp": 2, "pp": 2, "ep": 2, "strategy.data.kind": "ps", "consistency": "async"},
    "naive ddp": {"dp": 2, "strategy.data.kind": "naive_ddp"},
    "zero1": {"dp": 2, "strategy.data.kind": "zero1"},
    "zero2": {"dp": 2, "strategy.data.kind": "zero2", "microbatches": 2},
    "fsdp": {"dp": 2, "strategy.data.kind": "fsdp"},
    "hsdp": {"dp": 4, "strategy.data.kind": "fsdp", "strategy.data.shard": 2},
    "local_sgd": {"dp": 2, "strategy.data.kind": "local_sgd"},
    "diloco": {"dp": 2, "strategy.data.kind": "diloco"},
    "tp": {"tp": 4, "recompute": "full", "microbatches": 2},
    "tp, sequence parallel": {"tp": 2, "strategy.tensor.sequence_parallel": True},
    "2d": {"tp": 4, "layout": "2d"},
    "2d, SUMMA": {"tp": 4, "layout": "2d", "strategy.tensor.form": "summa"},
    "2.5d": {"tp": 8, "layout": "2.5d", "model.hidden": 32, "model.heads": 4},
    "3d": {"tp": 8, "layout": "3d", "recompute": "full"},
    "naive": {"pp": 4, "strategy.pipeline.kind": "naive"},
    "gpipe": {"pp": 4, "strategy.pipeline.kind": "gpipe", "microbatches": 8},
    "1f1b": {"pp": 2, "dp": 2, "microbatches": 4},
    "interleaved": {"pp": 2, "strategy.pipeline.kind": "interleaved", "microbatches": 4},
    "zero bubble": {"pp": 2, "strategy.pipeline.kind": "zero_bubble", "microbatches": 4},
    "zbv": {"pp": 2, "strategy.pipeline.kind": "zbv", "microbatches": 4},
    "dualpipev": {"pp": 2, "strategy.pipeline.kind": "dualpipev", "microbatches": 4},
    "experts, capacity": {"dp": 4, "ep": 2, **EXPERTS, "model.router.capacity_factor": 1.25},
    "experts, dropless": {"dp": 4, "ep": 4, **EXPERTS, "pp": 2, "microbatches": 2},
    "experts over dp x tp": {"dp": 2, "tp": 2, "ep": 4, "strategy.expert.tp": 1, **EXPERTS, "recompute": "full"},
    "all": {"dp": 2, "tp": 2, "pp": 2, "microbatches": 2, **RING},
}  # fmt: skip


def predicted(explanation: Explanation, plan: Plan, rank: int) -> list[Collective]:
    """The prediction of the explained strategy for one rank."""
    if plan.role(rank) == "server":
        return prediction.collectives(plan, rank)
    place = plan.mesh.coordinate(rank)
    blocks = tuple(plan.spec.block(name) for stage in plan.stages_of(place["pp"]) for name in stage.blocks)
    if explanation.axis == "data":
        return plan.data.collectives(place["pp"], place, plan)
    if explanation.axis == "pipeline":
        return plan.pipeline.collectives(place["pp"], plan)
    strategy = {"tensor": plan.tensor, "expert": plan.expert, "context": plan.context}[explanation.axis]
    assert strategy is not None
    return strategy.collectives(blocks, plan)


@pytest.mark.parametrize("name", PLANS)
def test_the_messages_add_up_to_the_prediction(name: str) -> None:
    plan = tiny_plan(PLANS[name])
    explanations = explain(plan)
    assert {one.axis for one in explanations} == {
        axis
        for axis, size in (
            ("data", plan.mesh.size("dp") * (1 + plan.servers)),
            ("tensor", plan.mesh.size("tp")),
            ("pipeline", plan.mesh.size("pp")),
            ("expert", plan.mesh.size("ep")),
            ("context", plan.mesh.size("cp")),
        )
        if size > 1
    }
    for explanation in explanations:
        assert 0 in explanation.ranks and explanation.text and explanation.source and explanation.exchanges
        for rank in explanation.ranks:
            listed, said = merge(rows(explanation, rank)), merge(predicted(explanation, plan, rank))
            assert [(*row_key(row), row.calls, row.payload_bytes) for row in listed] == [
                (*row_key(row), row.calls, row.payload_bytes) for row in said
            ], (explanation.axis, rank)


def row_key(row: Collective) -> tuple[str, str, str]:
    return row.axis, row.operation, row.purpose


def test_a_ring_of_four_passes_its_blocks_around() -> None:
    (exchange,) = explain(tiny_plan(dp=4, strategy__data__kind="ring"))[0].exchanges
    assert [one.title for one in exchange.rounds] == [f"round {n} of 6, scatter-reduce" for n in (1, 2, 3)] + [
        f"round {n} of 6, all-gather" for n in (4, 5, 6)
    ]
    told = [[(m.source, m.target, m.what) for m in one.messages] for one in exchange.rounds]
    assert told[0] == [(rank, (rank + 1) % 4, f"block {rank}, of rank {rank}") for rank in range(4)]
    assert told[1][0] == (0, 1, "block 3, sum of ranks 0 3") and told[2][0] == (0, 1, "block 2, sum of ranks 0 2 3")
    assert told[3][0] == (0, 1, "block 1, the total")


def test_a_tree_sends_everything_up_and_down() -> None:
    exchange = explain_all_reduce(TreeAllReduce(), range(4), 100, 4, "all")
    told = [[(m.source, m.target, m.what) for m in one.messages] for one in exchange.rounds]
    whole = "the whole buffer"
    assert told == [
        [(1, 0, f"{whole}, of rank 1"), (3, 2, f"{whole}, of rank 3")],
        [(2, 0, f"{whole}, sum of ranks 2 3")],
        [(0, 2, f"{whole}, the total")],
        [(0, 1, f"{whole}, the total"), (2, 3, f"{whole}, the total")],
    ]


def test_a_pipeline_sends_activations_on_and_gradients_back() -> None:
    explanation = explain(tiny_plan(pp=2, microbatches=2, strategy__pipeline__kind="gpipe"))[0]
    messages = [message for one in explanation.exchanges[0].rounds for message in one.messages]
    assert [(m.source, m.target, m.what.split(",")[0]) for m in messages] == [
        (0, 1, "activations of microbatch 0"),
        (0, 1, "activations of microbatch 1"),
        (1, 0, "their gradients of microbatch 0"),
        (1, 0, "their gradients of microbatch 1"),
    ]


def test_one_rank_has_nothing_to_explain() -> None:
    with pytest.raises(ConfigError, match="nothing to explain"):
        explain(tiny_plan())


def test_an_exchange_of_more_ranks_than_can_be_listed_is_refused_at_once() -> None:
    """4,096 ranks would send 33 million messages, which took all memory of the machine."""
    with pytest.raises(ConfigError, match="4096 ranks exchange messages with each other"):
        explain(tiny_plan({"strategy.data.kind": "ring", "dp": 4096, "global_batch": 4096}))


def test_the_screen_says_what_is_sent_and_folds_what_is_alike() -> None:
    told = report.text(explain(tiny_plan(dp=2, tp=2, strategy__data__kind="ring", model__layers=12)))
    assert "layers.0 to layers.11, each" in told and "0 -> 2  block 0, of rank 0" in told
    assert "all_reduce over ranks 0 1: activations" in told
    assert max(map(len, told.splitlines())) <= 80


def test_long_exchanges_are_cut_on_the_screen_and_whole_in_json() -> None:
    explanations = explain(tiny_plan(dp=16, global_batch=16, strategy__data__kind="ring"))
    assert "more lines; --json has all of them" in report.text(explanations)
    (one,) = report.document(explanations)["explanations"]
    assert sum(len(part["messages"]) for part in one["exchanges"][0]["rounds"]) == 2 * 15 * 16


def test_the_picture_has_an_arrow_for_every_message_and_a_bar_for_every_collective() -> None:
    data, tensor = explain(tiny_plan(dp=2, tp=2, strategy__data__kind="ring"))[::-1]
    messages = sum(len(part.messages) for exchange in data.exchanges for part in exchange.rounds)
    assert drawn_parts(data, "message") == messages > 0 and drawn_parts(data, "collective") == 0
    calls = sum(len(part.calls) for exchange in tensor.exchanges for part in exchange.rounds)
    assert drawn_parts(tensor, "collective") == calls > 0 and drawn_parts(tensor, "message") == 0


def drawn_parts(explanation: Explanation, kind: str) -> int:
    return sum(node.get("id") == kind for node in ElementTree.fromstring(report.picture(explanation)).iter())


def test_a_long_picture_says_how_much_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "MOST_DRAWN", 15)
    (one,) = explain(tiny_plan(dp=4, strategy__data__kind="ring"))
    assert 10 <= drawn_parts(one, "message") <= 15  # the others are titles
    left_out = 2 * 3 * 4 - drawn_parts(one, "message")
    assert f"{left_out} more are not drawn; --json lists them" in report.picture(one)
