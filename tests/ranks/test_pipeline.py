"""Every schedule computes what one device computes, in the planned order, with the planned messages and memory."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from parallelrun.config.schema.strategy_keys import narrowed
from parallelrun.planner.contract.pipeline_schedule import is_pair
from parallelrun.planner.contract.plan import Plan
from parallelrun.strategies.pipeline.schedule import boundary_bytes
from parallelrun.training.metrics.schedule_actions import schedule_document
from tests.matrix import FULL, TWO_STEPS, shared
from tests.parity import assert_equal, parity
from tests.plans import tiny_config, tiny_plan
from tests.pool import run_ranks
from tests.ranks import pipeline_body as body
from tests.unit.strategies.pipeline.test_orders import peak_in_flight

SETTING = {"precision.name": "fp64", "model.init_std": 0.2}
SPLIT = ("zero_bubble", "zbv")


def sizes(kind: str, pp: int, m: int, virtual_stages: int) -> dict:
    """One layer a stage, and at least four."""
    values = {**SETTING, "model.layers": max(4, pp * virtual_stages), "pp": pp, "microbatches": m}
    if kind != "none":
        values["schedule"] = kind
    if virtual_stages > 1:
        values["virtual_stages"] = virtual_stages
    return values


def run(overrides: dict, function, plan: Plan | None = None) -> list:
    plan = plan or tiny_plan(overrides)
    return run_ranks(plan.world, function, narrowed(tiny_config(overrides)), plan)


# `test_parity.py` has the other schedules of two stages
@pytest.mark.parametrize(
    ("kind", "pp", "m", "virtual_stages"),
    [
        ("naive", 4, 1, 1),
        ("gpipe", 4, 2, 1),
        ("1f1b", 4, 4, 1),
        *[("interleaved", 2, 4, 4), ("zero_bubble", 2, 4, 4)] * FULL,
        ("interleaved", 4, 8 if FULL else 4, 2),
        ("zero_bubble", 4, 4, 2),
        ("zbv", 2, 1, 2),
        ("zbv", 4, 4, 2),
    ],
)
def test_a_schedule_equals_one_device_and_sends_what_is_planned(kind, pp, m, virtual_stages):
    assert_equal(parity({**TWO_STEPS, **sizes(kind, pp, m, virtual_stages)}))


UNEVEN = {  # stages of embedding, layers or head; `layers` that the stages do not divide, or none on the outer two
    "interleaved, a layer less on the outer stages": {"pp": 2, "schedule": "interleaved", "virtual_stages": 4},
    "interleaved, sequence": {
        "pp": 4 if FULL else 2, "schedule": "interleaved", "virtual_stages": 2 if FULL else 4, "tp": 2,
        "strategy.tensor.sequence_parallel": True,
    },
    "interleaved, fsdp, recomputed": {
        "pp": 2, "dp": 2, "schedule": "interleaved", "virtual_stages": 4, "strategy.data.kind": "fsdp",
        "recompute": "full",
    },
    "1f1b, untied": {"pp": 8, "schedule": "1f1b", "model.tied_embeddings": False, "microbatches": 8},
    "zbv, zero1": {"pp": 4, "dp": 2, "schedule": "zbv", "strategy.data.kind": "zero1"},
    "interleaved, 5 layers": {"pp": 2, "schedule": "interleaved", "virtual_stages": 2, "model.layers": 5},
    "interleaved, 7 layers, 3 stages a rank": {
        "pp": 2, "schedule": "interleaved", "virtual_stages": 3, "model.layers": 7, "dp": 2,
        "strategy.data.kind": "zero1",
    },
}  # fmt: skip
if not FULL:  # others have as uneven stages, and more
    del UNEVEN["interleaved, a layer less on the outer stages"], UNEVEN["interleaved, 7 layers, 3 stages a rank"]
MICROBATCHES = 8 if FULL else 4


@pytest.mark.parametrize("name", shared(UNEVEN))
def test_stages_of_unequal_numbers_of_layers_equal_one_device(name):
    overrides = {
        **SETTING,
        "model.layers": 6,
        "global_batch": 2 * MICROBATCHES,
        "microbatches": MICROBATCHES,
        **UNEVEN[name],
    }
    sizes_of_stages = [len(stage.blocks) for stage in tiny_plan(overrides).stages]
    assert set(sizes_of_stages) == {1} or len(set(sizes_of_stages)) > 1
    assert_equal(parity(overrides))


@pytest.mark.parametrize(
    ("kind", "recompute"),
    [("gpipe", "full"), ("1f1b", "selective"), ("interleaved", "full"), ("zero_bubble", "none"), ("zbv", "full")],
)
def test_dropout_and_recomputation_change_nothing(kind, recompute):
    virtual_stages = 2 if kind in ("interleaved", "zbv") else 1
    dropout = {"dropout": 0.25, "model.attention_dropout": 0.1, "recompute": recompute}
    assert_equal(parity({**sizes(kind, 2, 4, virtual_stages), **dropout}))


EVALUATED = [
    ("none", 1, 4, 1),
    ("naive", 4, 1, 1),
    ("gpipe", 2, 4, 1),
    ("1f1b", 4, 4, 1),
    ("interleaved", 2, 4, 2),
    ("zero_bubble", 2, 2, 2),
    ("zbv", 2, 8 if FULL else 4, 2),
]


@pytest.mark.parametrize(("kind", "pp", "m", "virtual_stages"), EVALUATED)
def test_an_evaluation_is_that_of_one_device_and_leaves_no_trace(kind, pp, m, virtual_stages):
    overrides = sizes(kind, pp, m, virtual_stages)
    expected = body.evaluate_on_one_device(tiny_config(SETTING), tiny_plan(SETTING))
    results = run(overrides, body.evaluate_between_steps)
    assert sum(loss for loss, _ in results) == pytest.approx(expected, rel=1e-10)
    assert all(is_same for _, is_same in results)


def test_a_stage_in_the_wrong_place_is_noticed():
    overrides = sizes("1f1b", 4, 4, 1)
    plan = tiny_plan(overrides)
    first, second, third, fourth = (stage.blocks for stage in plan.stages)
    wrong = [replace(stage, blocks=blocks) for stage, blocks in zip(plan.stages, (first, third, second, fourth))]
    results = run(overrides, body.evaluate_between_steps, plan=replace(plan, stages=tuple(wrong)))
    expected = body.evaluate_on_one_device(tiny_config(SETTING), tiny_plan(SETTING))
    assert abs(sum(loss for loss, _ in results) / expected - 1) > 1e-6


def check_times(plan: Plan, records: list[dict]) -> None:
    """All planned actions are recorded in their order, one after the other, and after the messages that they need."""
    ends: dict[tuple[str, int, int], float] = {}
    begins: dict[tuple[str, int, int], float] = {}
    for pp_rank, row in enumerate(schedule_document(1, records)["ranks"]):
        keys = [(action["kind"], action["stage"], action["microbatch"]) for action in row["actions"]]
        assert keys == [(one.kind, one.stage, one.microbatch) for one in plan.pipeline.actions(plan)[pp_rank]]
        moments = [moment for action in row["actions"] for moment in (action["begin_s"], action["end_s"])]
        assert moments == sorted(moments) and moments[0] >= 0.0
        begins |= {key: action["begin_s"] for key, action in zip(keys, row["actions"])}
        ends |= {key: action["end_s"] for key, action in zip(keys, row["actions"])}
    for (kind, stage, microbatch), begin in begins.items():
        before = (kind, stage + {"F": -1}.get(kind, 1), microbatch)
        assert kind == "W" or begin >= ends.get(before, begin), f"{kind} {stage} {microbatch} began before its input"


@pytest.mark.parametrize(
    ("kind", "pp", "m", "virtual_stages"),
    [
        ("gpipe", 4, 8, 1),
        ("1f1b", 4, 8, 1),
        ("interleaved", 2, 4, 2),
        ("zero_bubble", 2, 8, 2),
        ("zbv", 2, 4, 2),
        ("dualpipev", 2, 4, 2),
    ],
)
def test_ranks_do_the_planned_actions_and_keep_the_planned_activations(kind, pp, m, virtual_stages):
    overrides = sizes(kind, pp, m, virtual_stages)
    plan = tiny_plan(overrides)
    outcomes = run(overrides, body.watch)
    check_times(plan, [record for _, _, record in outcomes])
    for pp_rank, (order, peak, _) in enumerate(outcomes):
        # Stage 0 has no input gradient to compute: its backward is all in W.
        planned = [
            ("F" if action.kind == "F" else "B", action.stage, action.microbatch)
            for action in plan.pipeline.actions(plan)[pp_rank]
            if action.kind != ("W" if action.stage else "I")
        ]
        assert order == planned
        assert peak == peak_in_flight(plan.pipeline.actions(plan)[pp_rank])


@pytest.mark.parametrize(
    ("kind", "pp", "m", "virtual_stages"),
    [
        ("gpipe", 4, 8, 1),
        ("1f1b", 4, 8, 1),
        ("interleaved", 2, 8, 2),
        ("zero_bubble", 4 if FULL else 2, 8, 2),
        ("zbv", 2, 8, 2),
        ("dualpipev", 2, 8, 2),
        *[("1f1b", 2, 2, 1), ("interleaved", 4, 8, 2), ("zbv", 4, 8, 2)] * FULL,
    ],
)
def test_messages_hold_the_bytes_that_are_planned(kind, pp, m, virtual_stages):
    overrides = sizes(kind, pp, m, virtual_stages)
    plan = tiny_plan(overrides)
    boundary = boundary_bytes(plan, 1)
    for pp_rank, (peaks, left) in enumerate(run(overrides, body.bytes_of_messages)):
        kept = {stage.index: boundary if stage.index else 0 for stage in plan.stages_of(pp_rank)}
        planned = max(most for _, _, most in plan.pipeline.walk(plan, pp_rank, kept))
        assert [peak / boundary for peak in peaks] == [planned / boundary] * 3, pp_rank
        assert left == 0


@pytest.mark.parametrize("recompute", ["none", *["full"] * FULL])
def test_each_all_to_all_of_a_pair_is_sent_while_its_other_pass_computes(recompute):
    """With recomputation backward has twice as many, and goes on alone when forward has ended."""
    experts = {"model.experts": 4, "model.expert_period": 1, "dp": 2, "ep": 2, "global_batch": 16}
    overrides = {**sizes("dualpipev", 2, 4, 2), **experts, "model.layers": 8, "recompute": recompute}
    plan, a_stage = tiny_plan(overrides), 2 * 2  # all-to-alls of a forward pass: of two layers, there and back
    for rank, count in enumerate(run(overrides, body.handovers)):
        order = plan.pipeline.order(plan, plan.mesh.coordinate(rank)["pp"])
        num_pairs = sum(is_pair(*actions) for actions in pairwise(order))
        assert count == num_pairs * 2 * a_stage > 0


@pytest.mark.parametrize(
    ("kind", "pp", "recompute"),
    [("none", 1, "none"), ("zero_bubble", 2, "full"), *[("1f1b", 2, "full"), ("zero_bubble", 2, "none")] * FULL],
)
def test_bf16_keeps_the_values_of_kept_copies_in_less_memory_than_fp32(kind, pp, recompute):
    virtual_stages = 2 if kind in ("interleaved", *SPLIT) else 1
    wide = {"model.hidden": 64, "model.ffn": 256, "model.layers": 4, "recompute": recompute}  # weights outweigh tokens
    if recompute == "full":  # what is kept is small: with fewer tokens still, one weight's own gradient decides
        wide["model.seq"] = 32
    peaks = []
    for precision in ("bf16", "fp32"):
        changes = {**sizes(kind, pp, 8 if FULL else 4, virtual_stages), **wide, "precision.name": precision}
        outcomes = run(changes, body.rounding_again)
        assert not any(other for other, _ in outcomes)
        peaks.append([peak for _, peak in outcomes])
    assert all(half < whole for half, whole in zip(*peaks, strict=True)), peaks


@pytest.mark.parametrize("recompute", ["full", *["selective"] * FULL])
def test_zero_bubble_leaves_no_activations_behind(recompute):
    for after_two, after_four in run({**sizes("zero_bubble", 2, 4, 2), "recompute": recompute}, body.tensors_alive):
        assert after_two == after_four
