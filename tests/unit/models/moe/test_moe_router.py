"""The router as a layer: groups and random choices by sample, whatever the microbatch; statistics that count once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from parallelrun.models import dropout
from parallelrun.models.moe.router import Router
from parallelrun.models.moe.routing import Routing, route
from parallelrun.planner.model.model_spec.router import RouterSpec
from parallelrun.planner.pieces import routing_statistics as statistics

F64 = torch.float64
HIDDEN, EXPERTS, SEQ = 6, 4, 8
GSHARD = RouterSpec(
    kind="gshard", top_k=2, score="softmax", renormalise="before", scaling=1.0, capacity_factor=1.0,
    eval_capacity_factor=None, min_capacity=1, drop_policy="position", second_expert="random", group_samples=1,
    aux_coefficient=0.1, z_coefficient=0.0, jitter=0.0, bias_rate=0.0,
)  # fmt: skip
IDS = torch.tensor([40, 41, 42, 43, 44, 45])


def router(spec: RouterSpec = GSHARD, dtype: torch.dtype = F64, seed: int = 1, site: str = "layers.1.moe") -> Router:
    layer = Router(HIDDEN, EXPERTS, spec, seed, site, dtype)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(0)))
        if layer.selection_bias is not None:
            layer.selection_bias.zero_()
    return layer.to(torch.promote_types(dtype, torch.float32))


def samples(count: int = 6) -> Tensor:
    return torch.randn(6, SEQ, HIDDEN, dtype=F64, generator=torch.Generator().manual_seed(1))[:count]


def run(layer: Router, x: Tensor, ids: Tensor) -> Routing:
    with dropout.scope(ids):
        return layer(x)


def dense(routing: Routing) -> Tensor:
    table = torch.zeros(routing.num_tokens, EXPERTS, dtype=routing.weights.dtype)
    return table.index_put((routing.tokens, routing.experts), routing.weights, accumulate=True)


SPECS = {
    "gshard": GSHARD,
    "groups of two samples": replace(GSHARD, group_samples=2),
    "jitter": replace(GSHARD, kind="switch", top_k=1, jitter=0.3),
    "expert choice": replace(GSHARD, kind="expert_choice", group_samples=2),
    "bias": replace(GSHARD, kind="top_k", score="sigmoid", bias_rate=0.001),
}


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("micro_batch", [2, 4])
def test_microbatches_are_routed_as_the_whole_batch(name: str, micro_batch: int) -> None:
    whole, parts = router(SPECS[name]), router(SPECS[name])
    routing = run(whole, samples(), IDS)
    pieces = [run(parts, x, ids) for x, ids in zip(samples().split(micro_batch), IDS.split(micro_batch))]
    torch.testing.assert_close(torch.cat([dense(one) for one in pieces]), dense(routing), rtol=1e-12, atol=1e-14)
    assert routing.auxiliary is not None
    torch.testing.assert_close(sum(one.auxiliary for one in pieces), routing.auxiliary)
    torch.testing.assert_close(parts.take_statistics(), whole.take_statistics())


def test_the_second_expert_is_drawn_by_sample_position_site_and_seed() -> None:
    def kept(layer: Router, ids: Tensor) -> list[bool]:
        return run(layer, samples(), ids).kept.tolist()

    spec = replace(GSHARD, capacity_factor=None)
    assert kept(router(spec), IDS) == kept(router(spec), IDS)
    others = (router(spec, site="layers.3.moe"), router(spec, seed=2))
    assert all(kept(other, IDS) != kept(router(spec), IDS) for other in others)
    assert kept(router(spec), IDS + 6) != kept(router(spec), IDS)  # the next step's samples
    one = router(spec)
    flat = torch.zeros(6, SEQ, HIDDEN, dtype=F64)  # all alike: 2 g2 = 1 is more than any draw
    assert run(one, flat, IDS).kept.all()
    with torch.no_grad():
        one.weight.copy_(torch.tensor([[9.0], [8.0], [0.0], [0.0]]).expand(EXPERTS, HIDDEN) / HIDDEN)
    draws = run(one, flat + 1, IDS).kept[6 * SEQ :].view(6, SEQ)
    assert (draws.any(1) & ~draws.all(1)).all() and (draws.any(0) & ~draws.all(0)).any()  # by sample and by position


def test_evaluation_needs_no_samples_draws_nothing_and_leaves_no_statistics() -> None:
    layer = router(replace(GSHARD, jitter=0.5)).eval()
    routing = layer(samples())
    logits = torch.nn.functional.linear(samples(), layer.weight)
    expected = route(logits, replace(GSHARD, second_expert="all"), training=True)
    assert torch.equal(dense(routing), dense(expected)) and routing.auxiliary is None
    assert layer.take_statistics() is None


@pytest.mark.parametrize("spec", [GSHARD, replace(GSHARD, second_expert="all", jitter=0.1)], ids=["draws", "jitter"])
def test_without_samples_in_scope_it_says_what_to_do(spec: RouterSpec) -> None:
    with pytest.raises(ValueError, match=r"layers\.1\.moe needs sample ids"):
        router(spec)(samples())
    router(replace(GSHARD, second_expert="all"))(samples())  # nothing random


def test_what_is_computed_again_gives_the_same_routing_and_counts_once() -> None:
    layer = router(replace(GSHARD, jitter=0.2))
    seen: list[Routing] = []

    def block(x: Tensor, ids: Tensor) -> Tensor:
        seen.append(run(layer, x, ids))
        return (seen[-1].weights * torch.arange(seen[-1].weights.numel())).sum() + seen[-1].auxiliary

    microbatches = list(zip(samples().requires_grad_().split(2), IDS.split(2)))
    for x, ids in microbatches:
        block(x, ids).backward(retain_graph=True)
    plain, expected = layer.take_statistics(), layer.weight.grad
    layer.weight.grad = None
    losses = [checkpoint(block, x, ids, use_reentrant=False) for x, ids in microbatches]
    for loss in losses:
        loss.backward(retain_graph=True)
    assert len(seen) == 9  # three, three, three again
    for first, again in zip(seen[3:6], seen[6:9]):
        assert torch.equal(first.kept, again.kept) and torch.equal(first.weights, again.weights)
    assert plain is not None and torch.equal(layer.take_statistics(), plain)
    assert plain[2 * EXPERTS + statistics.SCALARS.index("tokens")] == 6 * SEQ
    torch.testing.assert_close(layer.weight.grad, expected, rtol=1e-12, atol=0)
    assert layer.take_statistics() is None


def test_in_bf16_it_computes_in_fp32_with_the_weight_as_it_is_stored() -> None:
    layer = router(replace(GSHARD, second_expert="all", capacity_factor=None), torch.bfloat16)
    x = samples().bfloat16()
    routing = layer(x)
    assert routing.weights.dtype == torch.float32
    expected = route(x.float() @ layer.weight.T, replace(layer.spec), training=True)
    torch.testing.assert_close(routing.weights, expected.weights, rtol=1e-6, atol=1e-7)
    rounded = route(x.float() @ layer.weight.bfloat16().float().T, replace(layer.spec), training=True)
    assert not torch.allclose(routing.weights, rounded.weights, rtol=1e-4)


def test_jitter_multiplies_each_element_by_a_number_near_one() -> None:
    layer = router(replace(GSHARD, kind="top_k", jitter=0.25, capacity_factor=None))
    with dropout.scope(IDS):
        factors = layer._jittered(torch.ones(6, SEQ, HIDDEN, dtype=F64))
    assert 0.75 <= factors.min().item() < 0.78 and 1.22 < factors.max().item() <= 1.25
    assert factors.unique().numel() > 0.99 * factors.numel()
    bound = 5 * 0.25 / (3 * factors.numel()) ** 0.5
    assert factors.mean().item() == pytest.approx(1.0, abs=bound)


def test_the_selection_bias_is_frozen_and_there_only_where_it_moves() -> None:
    assert dict(router().named_parameters()).keys() == {"weight"}
    layer = router(SPECS["bias"])
    names = {name: parameter.requires_grad for name, parameter in layer.named_parameters()}
    assert names == {"weight": True, "selection_bias": False}
    before = run(layer, samples(), IDS)
    with torch.no_grad():
        layer.selection_bias[0] = -10.0
    assert 0 in before.experts and 0 not in run(layer, samples(), IDS).experts
