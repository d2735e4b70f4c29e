"""The candidates of a search: which degrees and batches are tried where the user leaves them open."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parallelrun.config.schema.run_schema import DEFAULT_GLOBAL_BATCH
from parallelrun.planner.resolve.resolve_config import spec_of
from parallelrun.planner.search.space import LEAST_SEQ, Space
from tests.unit.config.test_presets import composed


def space(world: int, *words: str) -> Space:
    found = composed("model=gpt", "dataset=synthetic", *words)
    return Space(found.config, found.given, world)


@pytest.mark.parametrize(
    ("seq", "world", "degrees"),
    [
        (2 * LEAST_SEQ - 1, 8, [1]),
        (2 * LEAST_SEQ, 8, [1, 2]),
        (4 * LEAST_SEQ, 8, [1, 2, 4]),
        (4 * LEAST_SEQ, 6, [1, 2, 3]),
        (64 * LEAST_SEQ, 8, [1, 2, 4, 8]),
    ],
)
def test_a_cp_rank_keeps_the_least_length_of_a_sequence(seq: int, world: int, degrees: list[int]) -> None:
    tried = space(world, f"model.seq={seq}")
    spec = spec_of(tried.folded, [])
    assert spec is not None and tried.context_degrees(spec) == degrees
    assert tried.context_degrees(replace(spec, kind="images")) == [1]
    assert space(world, f"model.seq={seq}", "cp=2").context_degrees(spec) == [2]


@pytest.mark.parametrize(("world", "batch"), [(1, 48), (5, 50), (7, 49), (16, 48), (32, 64), (48, 48), (64, 64)])
def test_the_batch_is_the_fewest_samples_from_the_default_on_that_every_degree_divides(world: int, batch: int) -> None:
    assert space(world).global_batch == batch
    assert batch % world == 0 and batch - world < DEFAULT_GLOBAL_BATCH <= batch
    assert space(world, "local_batch=3").global_batch == 3 * world
    assert space(world, "global_batch=7").global_batch == 7


@pytest.mark.parametrize(
    ("words", "over_dp", "over_tp"),
    [
        ((), {1}, {2, 4, 8}),  # of equal parts of 8 experts on a rank, those over tp
        (("model.experts=4",), {1, 4}, {2, 4}),
        (("strategy.expert.tp=1",), set(), {2, 4, 8}),
        (("strategy.expert.tp=2",), {1, 2, 4}, set()),
        (("ep=4",), {4}, {4}),
        (("model.router.capacity_factor=1", "strategy.expert.kind=capacity"), {1, 2, 4}, {2, 4, 8}),
        (("model.seq=63",), {1, 2, 4}, set()),
    ],
    ids=str,
)
def test_ep_is_tried_over_dp_and_over_dp_x_tp(words: tuple[str, ...], over_dp: set[int], over_tp: set[int]) -> None:
    found = composed("model=moe_gpt", "dataset=synthetic", *words)
    tried = Space(found.config, found.given, 8).experts(4, 1, 2, spec_of(found.config, []))
    whole = {ep for ep, section in tried if section.tp == 1}
    assert whole == over_tp and {ep for ep, section in tried if section.tp != 1} == over_dp
