"""Routing: GShard's Algorithm 1 and its successors against plain loops; what the rest of the program relies on."""

from __future__ import annotations

from dataclasses import replace
from math import exp, log

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from parallelrun.models.moe.routing import Routing, route
from parallelrun.planner.model.model_spec.router import RouterSpec
from parallelrun.planner.pieces import routing_statistics as statistics
from tests.matrix import FULL

F64 = torch.float64
GSHARD = RouterSpec(
    kind="gshard", top_k=2, score="softmax", renormalise="before", scaling=1.0, capacity_factor=1.0,
    eval_capacity_factor=None, min_capacity=1, drop_policy="position", second_expert="random", group_samples=1,
    aux_coefficient=0.0, z_coefficient=0.0, jitter=0.0, bias_rate=0.0,
)  # fmt: skip
TOP_K = replace(GSHARD, kind="top_k", second_expert="all")
SWITCH = replace(TOP_K, kind="switch", top_k=1)
EXPERT_CHOICE = replace(TOP_K, kind="expert_choice", renormalise="none")
KINDS = {"gshard": GSHARD, "top_k": TOP_K, "switch": SWITCH, "expert_choice": EXPERT_CHOICE}
DROPLESS = replace(TOP_K, capacity_factor=None)

Numbers = list[list[float]]  # of one group: (tokens, experts)
Reached = list[dict[int, tuple[float, int]]]  # of each token: {expert: (weight, slot)}

sizes = st.tuples(st.integers(1, 3), st.integers(1, 24), st.integers(2, 6))
factors = st.sampled_from([0.25, 0.5, 1.0, 2.0, None])


def drawn(groups: int, size: int, experts: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """(logits, a number in [0, 1) for each token)"""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(groups, size, experts, dtype=F64, generator=generator) * 2
    return logits, torch.rand(groups, size, generator=generator)


def dense(routing: Routing) -> Tensor:
    """(T, E): the weight with which each token reaches each expert."""
    table = torch.zeros(routing.num_tokens, routing.num_experts, dtype=routing.weights.dtype)
    return table.index_put((routing.tokens, routing.experts), routing.weights, accumulate=True)


def reached(routing: Routing) -> Reached:
    found: Reached = [{} for _ in range(routing.num_tokens)]
    columns = (routing.tokens, routing.experts, routing.weights, routing.kept, routing.slots)
    for token, expert, weight, kept, slot in zip(*(column.tolist() for column in columns), strict=True):
        if kept:
            assert expert not in found[token]
            found[token][expert] = (pytest.approx(weight, rel=1e-12), slot)
        else:
            assert weight == 0.0
    return found


def named(routing: Routing) -> dict[str, float]:
    """The scalars of the statistics."""
    return dict(zip(statistics.SCALARS, routing.statistics[2 * routing.num_experts :].tolist(), strict=True))


def best(scores: list[float], choices: int) -> list[int]:
    return sorted(range(len(scores)), key=lambda e: (-scores[e], e))[:choices]


# The algorithms, as they are written in the papers


def algorithm_1(gates: Numbers, uniform: list[float], capacity: int) -> Reached:
    """GShard, Algorithm 1, for one group."""
    count = [0] * len(gates[0])
    result: Reached = [{} for _ in gates]
    pairs = []
    for g in gates:
        e1, e2 = best(g, 2)
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


def top_k(scores: Numbers, spec: RouterSpec, capacity: int, bias: list[float]) -> Reached:
    """Top-k of one group: all first choices, then all second ones, ...; or the highest weights first."""
    wanted = []
    for token, row in enumerate(scores):
        chosen = best([score + b for score, b in zip(row, bias)], spec.top_k)
        total = sum(row[e] for e in chosen) if spec.renormalise == "before" and spec.top_k > 1 else 1.0
        wanted += [(choice, token, e, row[e] / total) for choice, e in enumerate(chosen)]
    wanted.sort()
    if spec.drop_policy == "probability":
        wanted.sort(key=lambda one: -one[3])
    count = [0] * len(bias)
    result: Reached = [{} for _ in scores]
    for _, token, e, weight in wanted:
        if count[e] < capacity:
            result[token][e] = (weight, count[e])
        count[e] += 1
    for row in result:
        total = sum(weight for weight, _ in row.values()) if spec.renormalise == "after" and spec.top_k > 1 else 1.0
        for e, (weight, slot) in row.items():
            row[e] = (weight / total * spec.scaling, slot)
    return result


def expert_choice(scores: Numbers, spec: RouterSpec, capacity: int) -> Reached:
    result: Reached = [{} for _ in scores]
    for e in range(len(scores[0])):
        for slot, token in enumerate(best([row[e] for row in scores], capacity)):
            result[token][e] = (scores[token][e] * spec.scaling, slot)
    if spec.renormalise != "none":
        result = [{e: (weight / len(row), slot) for e, (weight, slot) in row.items()} for row in result]
    return result


@settings(max_examples=60, deadline=None)
@given(sizes, factors, st.integers(0, 999))
def test_gshard_is_algorithm_1(shape: tuple[int, int, int], factor: float | None, seed: int) -> None:
    logits, uniform = drawn(*shape, seed)
    routing = route(logits, replace(GSHARD, capacity_factor=factor), training=True, uniform=uniform)
    expected: Reached = []
    for group, numbers in zip(logits, uniform):
        expected += algorithm_1(group.softmax(-1).tolist(), numbers.tolist(), routing.capacity)
    assert reached(routing) == expected


@settings(max_examples=100, deadline=None)
@given(
    sizes, factors, st.integers(1, 6), st.sampled_from(["softmax", "sigmoid"]),
    st.sampled_from(["none", "before", "after"]), st.sampled_from(["position", "probability"]),
    st.sampled_from([1.0, 2.5]), st.booleans(), st.integers(0, 999),
)  # fmt: skip
def test_top_k_is_the_written_loop(
    shape: tuple[int, int, int], factor: float | None, choices: int, score: str, renormalise: str, policy: str,
    scaling: float, biased: bool, seed: int,
) -> None:  # fmt: skip
    logits, _ = drawn(*shape, seed)
    spec = replace(
        TOP_K, capacity_factor=factor, top_k=min(choices, shape[2]), score=score, renormalise=renormalise,
        drop_policy=policy, scaling=scaling,
    )  # fmt: skip
    bias = torch.randn(shape[2], dtype=F64, generator=torch.Generator().manual_seed(seed)) if biased else None
    routing = route(logits, spec, training=True, selection_bias=bias)
    scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
    expected: Reached = []
    for group in scores.tolist():
        expected += top_k(group, spec, routing.capacity, [0.0] * shape[2] if bias is None else bias.tolist())
    assert reached(routing) == expected


@settings(max_examples=40, deadline=None)
@given(sizes, factors, st.sampled_from(["none", "before"]), st.integers(0, 999))
def test_experts_choose_their_best_tokens(
    shape: tuple[int, int, int], factor: float | None, renormalise: str, seed: int
) -> None:
    logits, _ = drawn(*shape, seed)
    spec = replace(EXPERT_CHOICE, capacity_factor=factor, renormalise=renormalise, scaling=1.5)
    routing = route(logits, spec, training=True)
    expected: Reached = []
    for group in logits.softmax(-1).tolist():
        expected += expert_choice(group, spec, routing.capacity)
    assert reached(routing) == expected
    load = routing.statistics[: shape[2]]
    assert load.tolist() == [shape[0] * routing.capacity] * shape[2]  # perfect by construction
    assert named(routing)["overflow"] == sum(not row for row in expected)


# What others rely on


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(sorted(KINDS)), sizes, factors, st.sampled_from(["position", "probability"]), st.booleans(),
    st.integers(0, 999),
)  # fmt: skip
def test_every_kept_assignment_has_a_place_of_its_own(
    kind: str, shape: tuple[int, int, int], factor: float | None, policy: str, training: bool, seed: int
) -> None:
    logits, uniform = drawn(*shape, seed)
    spec = replace(KINDS[kind], capacity_factor=factor, drop_policy=policy)
    routing = route(logits, spec, training=training, uniform=uniform)
    (num_groups, group_size, num_experts), kept = shape, routing.kept
    assert (routing.num_tokens, routing.num_groups) == (num_groups * group_size, num_groups)
    assert routing.capacity == spec.capacity(group_size, num_experts, training)
    assert routing.tokens.dtype == routing.experts.dtype == routing.slots.dtype == torch.int64
    assert routing.slots[kept].min().item() >= 0 and routing.slots[kept].max().item() < routing.capacity
    buffers = (routing.tokens // group_size * num_experts + routing.experts) * routing.capacity + routing.slots
    assert buffers[kept].unique().numel() == kept.sum().item()
    pairs = routing.tokens * num_experts + routing.experts
    assert pairs.unique().numel() == pairs.numel()  # nobody goes to an expert twice
    assert (routing.weights[~kept] == 0).all() and (routing.weights >= 0).all()
    if routing.capacity == group_size and not (kind == "gshard" and training):
        assert kept.all()
    if kind == "expert_choice":
        assert kept.all() and routing.tokens.numel() == num_groups * num_experts * routing.capacity
    else:
        assert routing.tokens.numel() == routing.num_tokens * spec.top_k
        drops = kept.numel() - kept.sum().item()
        assert drops == named(routing)["first_dropped"] + named(routing)["second_dropped"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", ["position", "probability"])
def test_groups_are_routed_as_if_alone(kind: str, policy: str) -> None:
    logits, uniform = drawn(3, 10, 4)
    spec = replace(KINDS[kind], drop_policy=policy, capacity_factor=0.5, aux_coefficient=0.3, z_coefficient=0.2)
    whole = route(logits, spec, training=True, uniform=uniform)
    alone = [route(logits[g : g + 1], spec, training=True, uniform=uniform[g : g + 1]) for g in range(3)]
    assert reached(whole) == [row for one in alone for row in reached(one)]
    assert whole.auxiliary is not None
    torch.testing.assert_close(whole.auxiliary, sum(one.auxiliary for one in alone))
    torch.testing.assert_close(whole.statistics, sum(one.statistics for one in alone))


@pytest.mark.parametrize("policy", ["position", "probability"])
@pytest.mark.parametrize("kind", [*KINDS, "dropless"])
def test_padding_is_routed_as_if_it_were_not_there(kind: str, policy: str) -> None:
    """Wherever in a group it is: of several samples, between their documents. Losses are means over tokens."""
    limit = {"capacity_factor": 1e-9, "min_capacity": 3}  # of padded groups and of those without padding alike
    spec = DROPLESS if kind == "dropless" else replace(KINDS[kind], **limit)
    spec = replace(spec, drop_policy=policy, aux_coefficient=0.3, z_coefficient=0.2)
    logits, uniform = drawn(3, 14, 4)
    is_token = torch.ones(3, 14, dtype=torch.bool)
    is_token[0, 3:6] = is_token[0, 12:] = is_token[1, 9:] = False
    found = route(logits, spec, training=True, uniform=uniform, is_token=is_token)
    alone = [
        route(one[there].unsqueeze(0), spec, training=True, uniform=draws[there].unsqueeze(0))
        for one, draws, there in zip(logits, uniform, is_token)
    ]
    tokens = [token for token, there in zip(reached(found), is_token.flatten().tolist()) if there]
    assert tokens == [token for one in alone for token in reached(one)]
    assert not any(token for token, there in zip(reached(found), is_token.flatten().tolist()) if not there)
    assert found.auxiliary is not None
    torch.testing.assert_close(found.auxiliary, torch.stack([one.auxiliary for one in alone]).sum())
    torch.testing.assert_close(found.statistics, torch.stack([one.statistics for one in alone]).sum(0))


def test_experts_leave_slots_empty_rather_than_take_padding() -> None:
    is_token = torch.zeros(2, 6, dtype=torch.bool)
    is_token[0, :2] = True
    logits, _ = drawn(2, 6, 3)
    found = route(
        logits, replace(EXPERT_CHOICE, capacity_factor=2.0, aux_coefficient=1.0), training=True, is_token=is_token
    )
    assert found.capacity == 6 and int(found.kept.sum()) == 2 * 3 and named(found)["overflow"] == 0
    assert found.statistics.isfinite().all()


def test_evaluation_draws_nothing_and_has_its_own_capacity() -> None:
    logits, uniform = drawn(2, 12, 4)
    spec = replace(GSHARD, capacity_factor=0.5, eval_capacity_factor=1.0, aux_coefficient=0.1, z_coefficient=0.1)
    routing = route(logits, spec, training=False)
    assert routing.capacity == 6 and routing.auxiliary is None
    everyone = replace(spec, second_expert="all", capacity_factor=1.0)
    assert reached(routing) == reached(route(logits, everyone, training=True))
    assert route(logits, spec, training=True, uniform=uniform).capacity == 3
    with pytest.raises(AssertionError, match="uniform"):
        route(logits, spec, training=True)


@pytest.mark.parametrize("spec", [SWITCH, replace(TOP_K, top_k=1)], ids=["switch", "top_1"])
@pytest.mark.parametrize("renormalise", ["none", "before", "after"])
def test_one_expert_keeps_its_probability_so_that_the_router_learns(spec: RouterSpec, renormalise: str) -> None:
    logits, _ = drawn(2, 8, 4)
    logits.requires_grad_()
    routing = route(logits, replace(spec, renormalise=renormalise, capacity_factor=None), training=True)
    torch.testing.assert_close(routing.weights, logits.detach().softmax(-1).amax(-1).flatten())
    (gradient,) = torch.autograd.grad(routing.weights.sum(), logits)
    assert (gradient.abs().amax(-1) > 1e-3).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", ["position", "probability"])
def test_decisions_can_be_taken_by_other_scores_than_the_weights_are_made_of(kind: str, policy: str) -> None:
    """As `verify` does: each decision (experts, drops, the drawn second expert) is the other training's."""
    spec = replace(KINDS[kind], drop_policy=policy, capacity_factor=0.5, renormalise="none")
    (own, uniform), (other, _) = drawn(2, 16, 4, seed=1), drawn(2, 16, 4, seed=2)
    expected = route(other, spec, training=True, uniform=uniform)
    held = route(own, spec, training=True, uniform=uniform, decide=lambda scores: other.flatten(0, 1).softmax(-1))
    for decision in ("tokens", "experts", "kept", "slots"):
        assert torch.equal(getattr(held, decision), getattr(expected, decision)), decision
    scores = own.flatten(0, 1).softmax(-1)[held.tokens, held.experts]
    torch.testing.assert_close(held.weights, scores * held.kept)
    assert (
        not torch.equal(held.experts, route(own, spec, training=True, uniform=uniform).experts)
        or kind == "expert_choice"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_equals_go_to_the_lower_expert_and_the_earlier_token(kind: str) -> None:
    spec = replace(KINDS[kind], capacity_factor=1.0, second_expert="all")
    routing = route(torch.zeros(1, 8, 4), spec, training=True)
    found = [sorted(row) for row in reached(routing)]
    full = routing.capacity
    if kind == "expert_choice":
        assert found == [[0, 1, 2, 3]] * full + [[]] * (8 - full)
    else:
        assert found == [list(range(spec.top_k))] * full + [[]] * (8 - full)


RENORMALISED = ("none", "before", "after")
WEIGHED = [(kind, score, again) for k, kind in enumerate(KINDS) for s, score in enumerate(("softmax", "sigmoid"))
           for a, again in enumerate(RENORMALISED) if FULL or (k + s + a) % 2 == 0]  # fmt: skip


@pytest.mark.parametrize(("kind", "score", "renormalise"), WEIGHED)
def test_gradients_of_weights_and_losses_are_those_of_differences(kind: str, score: str, renormalise: str) -> None:
    logits, uniform = drawn(2, 6, 4, seed=3)
    spec = replace(
        KINDS[kind], score=score, renormalise=renormalise, capacity_factor=0.75, aux_coefficient=0.5, z_coefficient=0.25
    )

    def outputs(values: Tensor) -> tuple[Tensor, Tensor]:
        routing = route(values, spec, training=True, uniform=uniform)
        assert routing.auxiliary is not None
        return routing.weights, routing.auxiliary

    assert torch.autograd.gradcheck(outputs, (logits.requires_grad_(),))


# Losses and statistics


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(KINDS)), sizes, st.sampled_from(["softmax", "sigmoid"]), st.integers(0, 999))
def test_losses_and_statistics_are_the_written_sums(
    kind: str, shape: tuple[int, int, int], score: str, seed: int
) -> None:
    logits, uniform = drawn(*shape, seed)
    spec = replace(KINDS[kind], score=score, aux_coefficient=0.7, z_coefficient=0.3, capacity_factor=0.5)
    routing = route(logits, spec, training=True, uniform=uniform)
    (num_groups, size, experts), aux, z, entropy = shape, 0.0, 0.0, 0.0
    load = [0] * experts
    for group in logits.tolist():
        counts, counted, shares = [0] * experts, 0, [0.0] * experts
        for row in group:
            scores = [exp(x) if score == "softmax" else 1 / (1 + exp(-x)) for x in row]
            z += log(sum(exp(x) for x in row)) ** 2 / size
            for e in range(experts):
                part = scores[e] / sum(scores)
                shares[e] += part / size
                entropy -= part * log(part)
            if kind != "expert_choice":
                for choice, e in enumerate(best(scores, spec.top_k)):
                    load[e] += 1
                    if choice == 0 or kind == "top_k":
                        counts[e], counted = counts[e] + 1, counted + 1
        if kind == "expert_choice":
            counts, counted = [1] * experts, experts
            load = [total + routing.capacity for total in load]
        aux += experts * sum(count / counted * share for count, share in zip(counts, shares))
    found = named(routing)
    assert [found["aux"], found["z"], found["router_entropy"]] == pytest.approx([aux, z, entropy], rel=1e-9)
    assert routing.auxiliary is not None and routing.auxiliary.item() == pytest.approx(0.7 * aux + 0.3 * z, rel=1e-9)
    assert routing.statistics[:experts].tolist() == load
    taken = torch.bincount(routing.experts[routing.kept], minlength=experts)
    assert routing.statistics[experts : 2 * experts].tolist() == taken.tolist()
    assert found["tokens"] == num_groups * size and found["groups"] == num_groups
    assert found["overflow"] == num_groups * size - routing.tokens[routing.kept].unique().numel()
    assert routing.statistics.dtype == F64 and not routing.statistics.requires_grad


def test_what_statistics_mean() -> None:
    """Two experts of three places in each of two groups of four tokens; see the hand-made vector."""
    spec = replace(TOP_K, capacity_factor=0.75, group_samples=2)
    vector = [12.0, 4.0, 6.0, 4.0, 8.0, 2.0, 1.0, 5.0, 2.0, 2.5, 3.0, 4.0]
    assert len(vector) == statistics.size(2)
    found = statistics.describe(vector, spec, seq=2)
    evenness = -(0.75 * log(0.75) + 0.25 * log(0.25)) / log(2)
    assert found == {
        "load": [12.0, 4.0], "kept": [6.0, 4.0], "drop_first": 1 / 8, "drop_second": 5 / 8, "overflow": 2 / 8,
        "capacity_used": pytest.approx(10 / 12), "max_vio": pytest.approx(0.5), "load_entropy": pytest.approx(evenness),
        "aux": 1.25, "z_loss": 1.5, "router_entropy": 0.5,
    }  # fmt: skip
    assert statistics.describe(vector, replace(spec, capacity_factor=None), seq=2)["capacity_used"] is None
    one_choice = statistics.describe([4.0, 4.0, 4.0, 4.0, 8.0, 1.0, *[0.0] * 6], replace(SWITCH), seq=8)
    assert (one_choice["drop_second"], one_choice["max_vio"], one_choice["load_entropy"]) == (0.0, 0.0, 1.0)


# Numbers and devices


@pytest.mark.parametrize("renormalise", ["before", "after"])
def test_scores_that_vanish_give_no_nan(renormalise: str) -> None:
    """A bias may choose an expert whose probability is 0 in fp32."""
    logits = torch.tensor([[[200.0, 0.0, -200.0, -200.0]]]).requires_grad_()
    bias = torch.tensor([-5.0, -5.0, 5.0, 5.0])
    spec = replace(DROPLESS, renormalise=renormalise, aux_coefficient=1.0, z_coefficient=1.0)
    for score in ("softmax", "sigmoid"):
        routing = route(logits, replace(spec, score=score), training=True, selection_bias=bias)
        assert routing.auxiliary is not None
        (gradient,) = torch.autograd.grad(routing.weights.sum() + routing.auxiliary, logits)
        assert routing.weights.isfinite().all() and gradient.isfinite().all() and routing.statistics.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", ["position", "probability"])
def test_nothing_waits_for_the_device(kind: str, policy: str) -> None:
    """Tensors without values: whoever asks for one, or for a shape that depends on one, fails."""
    spec = replace(KINDS[kind], drop_policy=policy, aux_coefficient=0.1, scaling=2.0, renormalise="after")
    logits = torch.empty(2, 8, 4, device="meta", requires_grad=True)
    bias, uniform = torch.empty(4, device="meta"), torch.empty(2, 8, device="meta")
    routing = route(logits, spec, training=True, selection_bias=bias, uniform=uniform)
    assert routing.statistics.shape == (statistics.size(4),) and routing.weights.shape == routing.tokens.shape


def test_thousands_of_experts_cost_no_table_of_assignments_by_experts() -> None:
    """2,048 experts: the widest tensor made is the scores' own, (tokens, experts)."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            largest = max([largest, *(x.numel() for x in torch.utils._pytree.tree_leaves(out) if hasattr(x, "numel"))])
            return out

    with Watch():
        route(torch.zeros(1, 64, 2048), TOP_K, training=True)
    assert largest == 64 * 2048


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "factor", "slots"),
    [
        (10, 4, 1, 1.0, 3),  # 2.5 tokens an expert
        (10, 4, 2, 1.0, 5),
        (10, 4, 1, 1.25, 4),  # 3.125
        (10, 8, 1, 1.0, 2),  # 1.25
        (7, 3, 2, 1.5, 7),
        (9, 8, 2, 1.0, 3),  # 2.25
        (12, 4, 1, 1.0, 3),  # exactly 3
        (50, 5, 1, 1.1, 11),  # exactly 11, though 50 * 1.1 / 5 is more in floats
        (2, 4, 1, 0.5, 1),  # an expert has at least min_capacity
        (3, 4, 2, 8.0, 3),  # never more than there are tokens
    ],
)
@pytest.mark.parametrize("kind", ["switch", "gshard"])
def test_an_expert_takes_its_even_share_rounded_up(kind, num_tokens, num_experts, top_k, factor, slots) -> None:
    """Slots worked out by hand: `verify` changes both sides of its comparison alike, so it cannot see a wrong rule."""
    spec = replace(KINDS[kind], top_k=top_k, capacity_factor=factor, min_capacity=1)
    assert spec.capacity(num_tokens, num_experts) == slots
    evaluated = replace(spec, capacity_factor=0.01, eval_capacity_factor=factor)
    assert evaluated.capacity(num_tokens, num_experts, training=False) == slots


@pytest.mark.parametrize(("score", "counted"), [("softmax", 1), ("sigmoid", 2)])
def test_a_token_uses_experts_of_its_best_groups_alone(score: str, counted: int) -> None:
    """DeepSeek-V2 ranks groups by their best expert, DeepSeek-V3 by their best two; some tokens decide otherwise by
    the other rule."""
    logits, _ = drawn(1, 60, 12)
    bias = torch.linspace(-0.3, 0.3, 12, dtype=F64)
    spec = replace(DROPLESS, score=score, top_k=3, n_group=4, topk_group=2)
    table = dense(route(logits, spec, training=False, selection_bias=bias))
    others = 0
    for token, row in enumerate(logits[0]):
        ranking = ((torch.sigmoid(row) if score == "sigmoid" else row.softmax(0)) + bias).tolist()

        def used(number: int, ranking: list[float] = ranking) -> list[int]:
            worth = [sum(sorted(ranking[3 * group : 3 * group + 3])[-number:]) for group in range(4)]
            groups = best(worth, 2)
            return sorted(best([v if e // 3 in groups else -9.0 for e, v in enumerate(ranking)], 3))

        assert table[token].nonzero().flatten().tolist() == used(counted)
        others += used(counted) != used(3 - counted)
    assert others > 2
