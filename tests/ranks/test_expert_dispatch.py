"""Rows to experts on other ranks and back: outputs and gradients of the plain sum over assignments, in fp64."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from tests.pool import run_ranks
from tests.ranks import expert_body as body
from tests.ranks.expert_body import Case

BOUND = 1e-12
expected = cache(body.expected)


def assert_right(results: list[Any], case: Case) -> None:
    truth, local = expected(case.load, len(results)), body.EXPERTS // len(results)
    for rank, (found, _) in enumerate(results):
        for name, value in found.items():
            own = slice(rank * local, (rank + 1) * local)
            right = truth[name][rank] if name in ("out", "x", "weights") else truth[name][own]
            kept = body.routing_of(case.load, rank).kept if name == "weights" else slice(None)
            assert value is not None, f"{case}: rank {rank} has no gradient of {name}"
            error = (value - right)[kept].abs().max().item() if value[kept].numel() else 0.0
            assert error < BOUND, f"{case}: {name} of rank {rank} is off by {error}"


def check(world: int, cases: list[Case]) -> list[Any]:
    results = run_ranks(world, body.several, cases)
    for number, case in enumerate(cases):
        assert_right([of_rank[number] for of_rank in results], case)
    return results


@pytest.mark.parametrize("kind", ["capacity", "dropless"])
@pytest.mark.parametrize("world", [2, 4])
def test_every_load_gives_the_sum_over_assignments_and_its_gradients(world, kind):
    loads = ("random", "starved", "idle", "piled", "nothing")
    check(world, [Case(kind, load, chunks) for load in loads for chunks in (1, 2)])


@pytest.mark.parametrize("kind", ["capacity", "dropless"])
def test_two_levels_give_bitwise_what_one_gives(kind):
    cases = [Case(kind, load, chunks, size) for load in ("random", "idle") for chunks in (1, 4) for size in (1, 2)]
    for of_rank in check(4, cases):
        for (one, _), (two, _) in zip(of_rank[::2], of_rank[1::2]):
            assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("kind", ["capacity", "dropless"])
def test_blocking_sends_the_same_as_overlapped(kind):
    cases = [Case(kind, overlap=overlap) for overlap in (True, False)]
    for (one, sent), (two, sent_blocking) in check(2, cases):
        assert all(torch.equal(one[name], two[name]) for name in one) and sent == sent_blocking > 0


def test_the_shared_expert_is_computed_while_rows_travel_in_both_passes():
    (events, _) = run_ranks(2, body.order_of_events, Case("capacity"))
    forward = ["send", "shared", "wait", "experts", "send", "wait"]
    backward = ["send", "wait", "experts backward", "send", "shared backward", "wait"]
    assert events == [*forward, "|", *backward]


def test_a_chunk_travels_while_the_one_before_it_is_computed_in_both_passes():
    (events, _) = run_ranks(2, body.order_of_events, Case("dropless", chunks=2))
    forward = ["send", "send", "shared", "wait", "experts", "send", "wait", "experts", "send", "wait", "wait"]
    half = ["wait", "experts backward", "send"]
    assert events == [*forward, "|", "send", "send", *half, *half, "shared backward", "wait", "wait"]


@pytest.mark.parametrize("kind", ["capacity", "dropless"])
@pytest.mark.parametrize("fault", ["arrival order", "expert order", "gradient of the row alone"])
def test_a_planted_bug_is_caught(fault, kind):
    case = Case(kind, group_size=2)
    results = run_ranks(4, body.with_fault, fault, case)
    with pytest.raises(AssertionError, match="is off by"):
        assert_right(results, case)
