"""What `resolve` fills in: the axes of a preset of several, the microbatches, and the cure of a large bubble."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from parallelrun.config.schema.run_schema import Config
from parallelrun.planner.contract.classes import pipeline_schedule
from parallelrun.planner.contract.plan import BatchSizes, Plan
from parallelrun.planner.contract.request import Request
from parallelrun.planner.facts.advice import warnings
from parallelrun.planner.facts.plan_facts import facts
from parallelrun.planner.pieces.batch import EFFICIENT_TOKENS, in_whole_rounds
from parallelrun.planner.resolve.draft import PlanDraft
from parallelrun.planner.resolve.resolve_config import resolve
from tests.plans import tiny_config, tiny_plan

PTDP = {
    "strategy.fill_order": ["tp", "pp", "dp"],
    "strategy.demo": {"tp": 2, "pp": 2},
    "model.layers": 8,
    "model.heads": 8,
    "global_batch": 48,
    "dp": None,
    "tp": None,
    "pp": None,
}
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv", "dualpipev")
# A model whose activations are large: one sample keeps about 0.4 GB a stage
LARGE = {
    "model.layers": 16,
    "model.hidden": 1024,
    "model.heads": 16,
    "model.seq": 512,
    "global_batch": 256,
}


def degrees(plan: Plan) -> tuple[int, int, int]:
    return plan.degrees["tp"], plan.degrees["pp"], plan.degrees["dp"]


# The axes of a preset


@pytest.mark.parametrize(
    ("world", "filled"),
    [(1, (1, 1, 1)), (2, (2, 1, 1)), (3, (1, 3, 1)), (4, (2, 2, 1)), (6, (2, 3, 1)), (8, (4, 2, 1)), (16, (8, 2, 1)),
     (32, (8, 4, 1)), (64, (8, 8, 1)), (128, (8, 8, 2))],
)  # fmt: skip
def test_tensor_grows_first_then_stages_then_replicas(world, filled):
    assert degrees(resolve(tiny_config({**PTDP, "world": world}))) == filled
    assert degrees(resolve(tiny_config(PTDP), world=world)) == filled, "under a launcher"


def test_it_is_said_what_was_filled():
    assert "tp=2 pp=2 dp=1 (filled: world 4)" in resolve(tiny_config({**PTDP, "world": 4})).filled


@pytest.mark.parametrize(
    ("given", "filled"),
    [({"dp": 2}, (2, 2, 2)), ({"tp": 1}, (1, 8, 1)), ({"pp": 1}, (8, 1, 1)), ({"dp": 2, "pp": 1}, (4, 1, 2)),
     ({"tp": 2, "pp": 2}, (2, 2, 2))],
)  # fmt: skip
def test_only_open_axes_are_filled(given, filled):
    assert degrees(resolve(tiny_config({**PTDP, **given, "world": 8}))) == filled


@pytest.mark.parametrize(
    ("limit", "filled"),
    [
        ({"model.heads": 2}, (2, 8, 1)),
        ({"model.layers": 2, "model.heads": 4}, (4, 2, 2)),
        ({"model.layers": 3, "model.heads": 4}, (4, 2, 2)),
        ({"cluster.gpus_per_node": 4}, (4, 4, 1)),
        ({"cluster.nodes": 8}, (2, 8, 1)),
        ({"cluster.gpus_per_node": 6}, (2, 8, 1)),  # of groups of 4, the second would be on two hosts
        # eight replicas of one sample each have no sample for a second microbatch, and 1F1B needs one a stage
        ({"global_batch": 2, "model.heads": 4}, (4, 2, 2)),
    ],
)
def test_the_filled_degrees_are_legal_for_model_batch_and_hosts(limit, filled):
    if limit.get("global_batch") == 2:
        with pytest.raises(Exception, match="1f1b"):
            resolve(tiny_config({**PTDP, **limit, "dp": 2, "tp": 4, "pp": 2, "world": 16}))
        limit, filled = {**limit, "model.heads": 16, "model.hidden": 32}, (8, 2, 1)
    assert degrees(resolve(tiny_config({**PTDP, **limit, "world": 16}))) == filled


def test_gpus_are_filled_in_the_same_order_and_idle_where_no_plan_is_legal():
    assert degrees(resolve(tiny_config(PTDP), gpus=8)) == (4, 2, 1)
    assert degrees(resolve(tiny_config(PTDP), world=16, gpus=4)) == (4, 4, 1), "a host has 4"
    plan = resolve(tiny_config({**PTDP, "model.layers": 4, "global_batch": 8}), gpus=5)
    assert degrees(plan) == (2, 2, 1) and plan.warnings[0] == "1 of 5 GPUs stay idle: no plan on 5 is legal"


def test_a_world_of_a_million_ranks_tries_few_plans(monkeypatch):
    tried = []
    real = PlanDraft.request
    monkeypatch.setattr(PlanDraft, "request", lambda *of: (tried.append(of), real(*of))[1])
    assert degrees(resolve(tiny_config({**PTDP, "world": 2**20, "global_batch": None}))) == (8, 8, 2**14)
    assert len(tried) < 40


def test_a_violation_that_no_degree_cures_is_told_once():
    with pytest.raises(Exception, match="global_batch=5 and local_batch=5"):
        resolve(tiny_config({**PTDP, "world": 4, "global_batch": 5, "local_batch": 5}))


# Microbatches


def batch_of(**overrides: object) -> tuple[int, int]:
    batch = tiny_plan({"global_batch": 48, "model.layers": 8, **overrides}).batch
    return batch.microbatches, batch.micro_batch


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("pp", "samples", "filled"),
    [(4, 48, 16), (2, 48, 8), (4, 50, 10), (4, 12, 12), (3, 48, 12), (4, 4, 4), (4, 1000, 20)],
)
def test_every_schedule_gets_the_same_microbatches_four_a_stage_where_the_batch_allows(schedule, pp, samples, filled):
    virtual_stages = {"virtual_stages": 1} if schedule in ("interleaved", "zero_bubble") and pp == 3 else {}
    assert batch_of(pp=pp, schedule=schedule, global_batch=samples, **virtual_stages)[0] == filled


@pytest.mark.parametrize("kind", SCHEDULES)
def test_every_schedule_of_several_microbatches_allows_whole_rounds(kind):
    strategy, config = pipeline_schedule(kind), tiny_config(pp=4)
    spec = tiny_plan().spec
    for pp in range(2, 9):
        for microbatches in filter(lambda m: in_whole_rounds(m, pp), range(1, 80)):
            batch = BatchSizes(microbatches, 1, microbatches)
            request = Request(config, spec, pp, 1, 1, 1 if kind in ("gpipe", "1f1b") else 2, batch)
            assert strategy.check(request) == []


def test_a_naive_pipeline_has_one_and_a_plan_without_a_pipeline_the_fewest():
    assert batch_of(pp=4, schedule="naive") == (1, 48)
    assert batch_of(dp=2) == (1, 24)


@pytest.mark.parametrize("pp", [1, 4])
def test_as_many_as_the_memory_of_a_device_asks(pp):
    def plan(memory_gb: float | None, schedule: str | None) -> Plan:
        return tiny_plan({**LARGE, "pp": pp, "schedule": schedule, "cluster.memory_gb": memory_gb})

    free = plan(None, None).batch.microbatches
    assert free == (1 if pp == 1 else 16)
    for memory_gb in (8.0, 16.0) if pp == 1 else (4.0, 8.0):
        chosen = plan(memory_gb, None)
        assert chosen.batch.microbatches > free, "all at once does not fit"
        needs = [memory.total / 1e9 for memory in facts(chosen, Config()).memories.values()]
        assert max(needs) <= 0.9 * memory_gb
        half = replace(chosen, batch=BatchSizes(256, 2 * chosen.batch.micro_batch, chosen.batch.microbatches // 2))
        if half.batch.microbatches >= 4 * pp:
            assert max(memory.total for memory in facts(half, Config()).memories.values()) > 0.9e9 * memory_gb
        others = {plan(memory_gb, schedule).batch for schedule in SCHEDULES if pp > 1}
        assert others <= {chosen.batch}, "whatever the schedule's own memory"


def test_microbatches_have_no_more_tokens_than_make_kernels_faster():
    plan = tiny_plan({"pp": 4, "model.seq": 4096, "global_batch": 64, "dataset.samples": 5000})
    assert plan.batch.micro_batch * 4096 == EFFICIENT_TOKENS
    assert any("of at most 8,192 tokens" in sentence for sentence in plan.filled)


# The bubble


def cure(**overrides: object) -> str | None:
    """What the warning says should be typed."""
    config = tiny_config({"model.layers": 16, "global_batch": 48, **overrides})
    plan = resolve(config)
    texts = [text for text in warnings(plan, config, facts(plan, config)) if "bubble" in text]
    return texts[0].split(": ", 1)[1] if texts else None


@pytest.mark.parametrize("schedule", [*SCHEDULES, "naive"])
@pytest.mark.parametrize(
    "given", [{}, {"microbatches": 4}, {"micro_batch": 12}, {"global_batch": None, "local_batch": 4}]
)
def test_a_bubble_above_15_percent_is_told_with_what_mends_it(schedule, given):
    if schedule == "naive":
        given = {"microbatches": 1} if "microbatches" in given else {} if "micro_batch" in given else given
    base = {"pp": 4, "schedule": schedule, **given}
    told = cure(**base)
    typed = dict(re.findall(r"([a-z_]+)=(\w+)", told or ""))
    if told is None:
        plan = tiny_plan({"model.layers": 16, "global_batch": 48, **base})
        assert facts(plan, Config()).simulation.bubble_of_total <= 0.15
        return
    assert typed, told
    mended = {**base, **{key: value if key == "schedule" else int(value) for key, value in typed.items()}}
    assert cure(**mended) is None
    plan = tiny_plan({"model.layers": 16, "global_batch": 48, **mended})
    bubble = facts(plan, Config()).simulation.bubble_of_total
    assert f"brings it to {bubble:.0%}" in told and bubble <= 0.15


@pytest.mark.parametrize("given", [{}, {"microbatches": 4}, {"global_batch": None, "local_batch": 4}])
def test_a_schedule_with_a_smaller_bubble_of_the_same_batch_is_told(given):
    base: dict[str, object] = {"model.layers": 16, "global_batch": 48, "pp": 4, **given}
    config = tiny_config(base)
    plan = resolve(config)
    before = facts(plan, config)
    told = next(text for text in warnings(plan, config, before) if text.startswith("with the same batch"))
    typed = dict(re.findall(r"([a-z_]+)=(\w+)", told))
    changed = tiny_plan({**base, **{key: value if key == "schedule" else int(value) for key, value in typed.items()}})
    assert changed.batch == plan.batch
    left = facts(changed, config).simulation.bubble_of_total
    assert told.endswith(f"makes the bubble {left:.0%}") and left <= 0.75 * before.simulation.bubble_of_total
    others = [tiny_plan({**base, "schedule": kind}) for kind in SCHEDULES]
    assert all(left <= facts(one, config).simulation.bubble_of_total for one in others if one.batch == plan.batch)


def test_uneven_stages_are_no_matter_of_microbatches():
    told = cure(**{"model.layers": 5, "pp": 4})
    assert told is not None and "uneven" in told
