"""The expert dispatchers before a run: what is legal, and their all-to-alls in closed form against numbers made by
hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from parallelrun.base.errors import ConfigError
from parallelrun.planner.contract.collective import Collective
from parallelrun.planner.predict import prediction
from parallelrun.strategies.expert.capacity.plan import CapacityDispatcher
from parallelrun.strategies.expert.dropless.plan import DroplessDispatcher
from tests.plans import tiny_plan

# 2 of 4 layers have 8 experts; a microbatch of 2 samples of 8 tokens on each of 4 ranks, 16 numbers of 4 bytes a row
EXPERTS = {"model.experts": 8, "dp": 4, "ep": 4}
LIMITED = {**EXPERTS, "model.router.capacity_factor": 2.0, "model.router.min_capacity": 1}
ROW, LAYERS, TOKENS = 16 * 4, 2, 16
PLACES = 8 * 2 * 4  # experts x groups x ceil(8 tokens x 2 x factor 2 / 8 experts)
CHUNKS, SIZE = "strategy.expert.chunks", "strategy.expert.group_size"
DROPLESS = {"strategy.expert.kind": "dropless"}


def sent(overrides: dict[str, Any], rank: int = 0) -> dict[tuple[str, str], Collective]:
    """The all-to-alls of a rank by axis and purpose."""
    rows = prediction.collectives(tiny_plan(overrides), rank)
    return {(row.axis, row.purpose): row for row in rows if row.operation == "all_to_all"}


def problems(overrides: dict[str, Any]) -> list[tuple[str, str, str]]:
    with pytest.raises(ConfigError) as caught:
        tiny_plan(overrides)
    return [(p.what, p.where, p.suggestion) for p in caught.value.problems]


def test_a_way_is_chosen_by_the_routers_limit_and_settled():
    assert tiny_plan(LIMITED).expert == CapacityDispatcher(1, 1, True)
    settings = {CHUNKS: 2, SIZE: 2, "strategy.expert.overlap": False}
    assert tiny_plan({**EXPERTS, **settings}).expert == DroplessDispatcher(2, 2, False)


def test_dropless_sends_every_choice_at_an_even_load_and_at_most_all_choices_of_all_ranks_come():
    rows, counts = sent({**EXPERTS, CHUNKS: 2}).values()
    leave, come = TOKENS * 2, 4 * TOKENS * 2  # a token's two experts may both be on one rank
    assert rows.payload_bytes == LAYERS * 4 * leave * ROW and rows.calls == LAYERS * 4 * 2
    assert rows.most_bytes == LAYERS * 2 * (leave + come) * ROW
    assert (counts.calls, counts.payload_bytes) == (LAYERS, LAYERS * 8 * 2 * 8)  # a number per expert and chunk


def test_a_limit_bounds_what_can_come_and_experts_that_choose_leave_no_doubt():
    limited = sent({**LIMITED, **DROPLESS})["ep", "experts"]
    leave, come = TOKENS * 2, 4 * PLACES * 2 // 8
    assert limited.payload_bytes == LAYERS * 4 * leave * ROW and limited.most_bytes == LAYERS * 2 * (leave + come) * ROW
    choice = {**LIMITED, "model.router.kind": "expert_choice"}
    assert sent({**choice, **DROPLESS})["ep", "experts"] == sent(choice)["ep", "experts"]
    assert sent(choice)["ep", "experts"].most_bytes is None


def test_between_two_levels_an_inner_group_may_hold_all_its_rows_for_one_place():
    rows = sent({**EXPERTS, SIZE: 2})
    leave, halfway, come = TOKENS * 2, 2 * TOKENS * 2, 4 * TOKENS * 2
    assert rows["ep_inner", "experts"].most_bytes == LAYERS * 2 * (leave + halfway) * ROW
    assert rows["ep_outer", "experts"].most_bytes == LAYERS * 2 * (halfway + come) * ROW
    assert rows["ep_outer", "routing"] == replace(rows["ep_inner", "routing"], axis="ep_outer")


def test_stages_without_experts_send_nothing():
    plan = {"model.experts": 8, "model.expert_period": 1, "model.dense_layers": 2, "dp": 2, "ep": 2, "pp": 2}
    assert not sent(plan) and sent(plan, rank=2)


def test_chunks_must_divide_the_groups_of_a_microbatch():
    ((what, where, fix),) = problems({**EXPERTS, "global_batch": 32, "micro_batch": 4, CHUNKS: 3})
    assert "does not divide the 4 routing groups of a microbatch" in what and where == CHUNKS
    assert fix == f"{CHUNKS}=2 or {CHUNKS}=4"
    ((_, _, fix),) = problems({**EXPERTS, "global_batch": 32, "micro_batch": 2, CHUNKS: 8})
    assert fix == f"{CHUNKS}=1 or {CHUNKS}=2 or micro_batch=8"


@pytest.mark.parametrize(
    ("size", "why"), [(1, "leave no second level"), (4, "leave no second level"), (3, "divide ep=4")]
)
def test_inner_groups_must_be_a_proper_part_of_ep(size, why):
    ((what, where, fix),) = problems({**EXPERTS, SIZE: size})
    assert why in what and where == SIZE and fix == f"{SIZE}=2 or leave {SIZE} out"


def test_what_empty_places_cost_is_in_the_memory():
    def kept(**more: Any) -> int:
        return prediction.memory(tiny_plan({**LIMITED, "precision.name": "fp64", **more}), 0).activations

    hidden, ffn, numbers = 16, 64, 2 * 8 + 8  # the token and the assignment of a place, and its weight
    of_row = (2 * hidden + 2 * ffn) * 8 + numbers
    assert kept() - kept(ep=1) == LAYERS * ((PLACES - TOKENS * 2) * of_row + TOKENS * 2)
    assert kept(recompute="full") == kept(ep=1, recompute="full")
