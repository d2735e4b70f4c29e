"""`parallelrun explain`: what is listed message by message adds up to what is predicted."""

from __future__ import annotations

from collections import Counter
from typing import Any
from xml.etree import ElementTree

import pytest

from parallelrun.config import presets
from parallelrun.errors import ConfigError
from parallelrun.plan import account
from parallelrun.plan.explain import explain
from parallelrun.plan.explanation import rows_of
from parallelrun.plan.structure import Plan
from parallelrun.report import explain as report
from tests.plans import tiny_plan

MOE = {"model.experts": 4, "model.expert_period": 1, "model.router.capacity_factor": 1.25}
HALVING = {"strategy.data.algorithm": "halving_doubling"}
LEVELS = {"strategy.data.algorithm": "hierarchical", "strategy.data.group_size": 2}
STAGES = {"pp": 2, "microbatches": 4, "model.layers": 4, "global_batch": 16}
SEQUENCE = {"strategy.tensor.sequence_parallel": True}
CASES = {
    "ring": {"strategy": "ring", "dp": 4},
    "ring, 3 ranks": {"strategy": "ring", "dp": 3, "global_batch": 12},
    "halving and doubling": {"strategy": "ring", "dp": 4, **HALVING},
    "halving and doubling, 6": {"strategy": "ring", "dp": 6, "global_batch": 12, **HALVING},
    "hierarchical": {"strategy": "ring", "dp": 4, **LEVELS},
    "ring with stages": {"strategy": "ring", "dp": 2, "pp": 2, "tp": 2},
    "horovod": {"strategy": "horovod", "dp": 4, "strategy.data.algorithm": "ring"},
    "powersgd over a ring": {"strategy": "ring", "dp": 2, "strategy.data.compression": "powersgd"},
    "ddp": {"strategy": "ddp", "dp": 2},
    "ddp with all axes": {"strategy": "ptdp", "dp": 2, "tp": 2, "pp": 2},
    "zero1": {"strategy": "zero1", "dp": 2},
    "zero2": {"strategy": "zero2", "dp": 2},
    "fsdp": {"strategy": "fsdp", "dp": 2},
    "hsdp": {"strategy": "hsdp", "dp": 4, "strategy.data.shard": 2},
    "local_sgd": {"strategy": "local_sgd", "dp": 2},
    "diloco": {"strategy": "diloco", "dp": 2},
    "ps": {"strategy": "ps", "dp": 3, "servers": 2, "global_batch": 12, "strategy.data.shard_min_kb": 0},
    "async ps": {"strategy": "ps", "dp": 2, "servers": 1, "consistency": "async"},
    "1d": {"strategy": "tp", "tp": 2},
    "1d, sequence parallel, recomputed": {"strategy": "tp", "tp": 2, **SEQUENCE, "recompute": "full"},
    "2d": {"strategy": "tp2d", "tp": 4},
    "summa": {"strategy": "tp2d", "tp": 4, "strategy.tensor.form": "summa"},
    "2.5d": {"strategy": "tp25d", "tp": 8},
    "3d": {"strategy": "tp3d", "tp": 8},
    "3d, recomputed": {"strategy": "tp3d", "tp": 8, "recompute": "full"},
    "gpipe": {"strategy": "gpipe", "pp": 2, "microbatches": 4},
    "1f1b": {"strategy": "1f1b", "pp": 4, "microbatches": 8, "model.layers": 4, "global_batch": 16},
    "interleaved": {"strategy": "interleaved", **STAGES},
    "zero bubble": {"strategy": "zero_bubble", **STAGES},
    "zbv": {"strategy": "1f1b", "schedule": "zbv", **STAGES},
    "experts": {**MOE, "strategy": "gshard", "dp": 2, "ep": 2},
    "experts in chunks": {
        **MOE, "strategy": "gshard", "dp": 4, "ep": 4, "strategy.expert.group_size": 2, "recompute": "full",
    },
    "dropless": {**MOE, "strategy": "dropless", "dp": 2, "ep": 2, "model.router.capacity_factor": None},
}  # fmt: skip


def plan_of(case: dict[str, Any]) -> Plan:
    """The tiny model under a preset, as the command line composes it."""
    given = dict(case)
    preset = presets.values("strategy", given.pop("strategy"))
    for key, value in preset.items():
        if isinstance(value, dict) and key in ("data", "tensor", "pipeline", "expert"):
            given = {**{f"strategy.{key}.{inner}": one for inner, one in value.items()}, **given}
        elif key != "defaults":
            given[f"strategy.{key}"] = value
    return tiny_plan(given)


@pytest.mark.parametrize("name", CASES)
def test_what_is_listed_adds_up_to_what_is_predicted(name):
    plan = plan_of(CASES[name])
    explained = explain(plan)
    for rank in range(plan.world):
        listed: Counter = Counter()
        for one in explained:
            for key, (calls, payload) in rows_of(one, rank).items():
                listed[key, "calls"] += calls
                listed[key, "bytes"] += payload
        for row in account.collectives(plan, rank):
            key = row.axis, row.operation, row.purpose
            if row.axis == "world" and not plan.servers:  # the loop's own agreement, of no strategy
                continue
            found = listed.pop((key, "calls")), listed.pop((key, "bytes"))
            assert found == (row.calls, row.payload_bytes), (rank, key)
        assert not listed, (rank, listed)


def test_a_ring_lists_the_blocks_of_scatter_reduce_and_all_gather():
    """Gibiansky 2017: in round k rank i sends block i - k, which is added; then block i + 1 - k, which is kept."""
    (ring,) = explain(plan_of({"strategy": "ring", "dp": 4, "model.tied_embeddings": False}))
    first = [step for step in ring.steps if step.title.startswith("sum 1 ")]
    assert len(first) == 6
    for number, step in enumerate(first):
        gathering, k = number >= 3, number % 3
        sent = {(t.ranks[0], t.ranks[1], t.block, t.effect) for t in step.transfers}
        assert sent == {
            (i, (i + 1) % 4, f"block {(i + gathering - k) % 4} of 4", "kept" if gathering else "added")
            for i in range(4)
        }


@pytest.mark.parametrize("name", ["ring, 3 ranks", "halving and doubling, 6", "hierarchical", "ps", "1f1b"])
def test_a_picture_has_a_lane_for_every_rank_and_an_arrow_for_every_message(name):
    plan = plan_of(CASES[name])
    explained = explain(plan)
    root = ElementTree.fromstring(report.svg(explained, "title <&>"))
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert [text for text in texts if text in {f"rank {rank}" for rank in range(plan.world)}] == [
        f"rank {rank}" for rank in range(plan.world)
    ]
    arrows = [e for e in root.iter("{http://www.w3.org/2000/svg}line") if e.get("marker-end")]
    messages = [t for one in explained for step in one.steps for t in step.transfers if t.operation == "send"]
    assert len(arrows) == len(messages) <= report.MOST_DRAWN
    width = float(root.get("width", "0"))
    for element in root.iter("{http://www.w3.org/2000/svg}text"):
        half = 6.5 * len(element.text or "") * float(element.get("font-size", "10")) / 20
        start = float(element.get("x", "0")) - (half if element.get("text-anchor") == "middle" else 0)
        assert start >= 0 and start + 2 * half <= width + 1, element.text


def test_text_and_json_hold_what_is_explained():
    explained = explain(plan_of(CASES["ps"]))
    said = "\n".join(report.lines(explained))
    assert "rank 0 -> rank 3" in said and "weights of shard 1" in said
    (one,) = report.document(explained)["explained"]
    assert [step["title"] for step in one["steps"]] == [step.title for step in explained[0].steps]


def test_a_plan_of_many_ranks_is_refused_before_its_messages_are_listed():
    with pytest.raises(ConfigError, match="up to 64 ranks"):
        explain(plan_of({"strategy": "ddp", "dp": 128, "global_batch": 128}))
