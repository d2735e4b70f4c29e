"""Routing: GShard's Algorithm 1 and its successors against plain loops; what the rest of the program relies on."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from parallelrun.models.moe import statistics
from parallelrun.models.moe.routing import Routing, route
from parallelrun.models.spec import RouterSpec

F64 = torch.float64


def spec(**changes: object) -> RouterSpec:
    """A gshard router whose experts take exactly their even share."""
    values: dict[str, object] = dict(
        kind="gshard", top_k=2, score="softmax", renormalise="before", scaling=1.0, capacity_factor=1.0,
        eval_capacity_factor=None, min_capacity=1, drop_policy="position", second_expert="random", group_samples=1,
        aux_coefficient=0.0, z_coefficient=0.0, jitter=0.0, bias_rate=0.0,
    )  # fmt: skip
    return RouterSpec(**(values | changes))  # type: ignore[arg-type]


def drawn(groups: int, size: int, experts: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """(logits, uniform numbers)"""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(groups, size, experts, dtype=F64, generator=generator) * 2
    return logits, torch.rand(groups, size, generator=generator)


def combined(routing: Routing) -> Tensor:
    """(T, E): the weight with which each token reaches each expert."""
    dense = torch.zeros(routing.num_tokens, routing.num_experts, dtype=routing.weights.dtype)
    return dense.index_put((routing.tokens, routing.experts), routing.weights, accumulate=True)


def algorithm_1(gates: list[list[float]], uniform: list[float], capacity: int) -> list[dict[int, tuple[float, int]]]:
    """GShard, Algorithm 1, for one group: of each token {expert: (weight, position)}."""
    count = [0] * len(gates[0])
    result: list[dict[int, tuple[float, int]]] = [{} for _ in gates]
    pairs = []
    for g in gates:
        e1 = g.index(max(g))
        e2 = max((e for e in range(len(g)) if e != e1), key=lambda e: (g[e], -e))
        pairs.append((e1, e2, g[e1] / (g[e1] + g[e2]), g[e2] / (g[e1] + g[e2])))
    for s, (e1, _, g1, _) in enumerate(pairs):
        if count[e1] < capacity:
            result[s][e1] = (g1, count[e1])
        count[e1] += 1
    for s, (_, e2, _, g2) in enumerate(pairs):
        if count[e2] < capacity and 2 * g2 > uniform[s]:
            result[s][e2] = (g2, count[e2])
        count[e2] += 1
    return result


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 24),
    st.integers(2, 6),
    st.sampled_from([0.25, 0.5, 1.0, 2.0]),
    st.integers(0, 999),
)
def test_gshard_is_algorithm_1(groups: int, size: int, experts: int, factor: float, seed: int) -> None:
    logits, uniform = drawn(groups, size, experts, seed)
    routing = route(logits, spec(capacity_factor=factor), training=True, uniform=uniform)
    found = [{} for _ in range(groups * size)]
    for token, expert, weight, kept, slot in zip(
        *(x.tolist() for x in (routing.tokens, routing.experts, routing.weights, routing.kept, routing.slots))
    ):
        if kept:
            found[token][expert] = (pytest.approx(weight, rel=1e-12), slot)
        else:
            assert weight == 0.0
    expected = []
    for group in range(groups):
        expected += algorithm_1(logits[group].softmax(-1).tolist(), uniform[group].tolist(), routing.capacity)
    assert found == expected


def test_statistics_have_the_promised_size() -> None:
    logits, uniform = drawn(2, 8, 4)
    assert route(logits, spec(), training=True, uniform=uniform).statistics.shape == (statistics.size(4),)
