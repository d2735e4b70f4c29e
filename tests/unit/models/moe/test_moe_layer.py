"""Experts on one device: what the layer gives and every gradient are those of plain loops over tokens and experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from parallelrun.base.errors import ConfigError
from parallelrun.base.precision import TABLE
from parallelrun.config.schema.model_schema import RouterConfig
from parallelrun.config.schema.run_schema import Config
from parallelrun.distributed import torch_private
from parallelrun.models import dropout
from parallelrun.models.functions import activate
from parallelrun.models.gpt import spec as gpt
from parallelrun.models.moe.experts import Experts, grouped_multiply
from parallelrun.models.moe.layer import LocalDispatcher, MoE
from parallelrun.models.moe.routing import Routing
from parallelrun.models.moe.spec import has_experts, router_spec
from parallelrun.models.transformer.modules import LayerFactory
from parallelrun.planner.contract.classes import tensor_strategy
from parallelrun.planner.contract.request import Request
from parallelrun.planner.model.model_spec.router import OWN
from tests.plans import narrow_config, tiny_config, tiny_plan

HIDDEN, FFN, EXPERTS, SAMPLES, SEQ = 8, 12, 4, 3, 8
IDS = torch.tensor([3, 4, 5])
SCALE = 0.7  # of the auxiliary loss
ROUTERS = {
    "top_k": RouterConfig(top_k=3),
    "gshard": RouterConfig(kind="gshard", second_expert="random", capacity_factor=1.0, min_capacity=1),
    "switch": RouterConfig(kind="switch", top_k=1, capacity_factor=0.5, min_capacity=1, jitter=0.1, z_coefficient=0.1),
    "renormalised after": RouterConfig(renormalise="after", capacity_factor=0.5, drop_policy="probability"),
    "expert choice": RouterConfig(kind="expert_choice", aux_coefficient=0.0),
    "aux free": RouterConfig(score="sigmoid", scaling=2.5, bias_rate=1e-3),
}


def layer(router: RouterConfig, precision: str = "fp64", **sizes: Any) -> MoE:
    """A layer with weights that depend on nothing but its sizes."""
    config = Config()
    given = {"hidden": HIDDEN, "ffn": FFN, "heads": 2, "experts": EXPERTS, "router": router}
    for key, value in {**given, **sizes}.items():
        setattr(config.model, key, value)
    spec = router_spec(config.model)
    assert spec is not None
    moe = MoE("layers.1.moe", LayerFactory(config, 8, TABLE[precision]), spec)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    moe.auxiliary_scale = SCALE
    return moe.to(getattr(torch, TABLE[precision].stored))


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """(x, the gradient of what the layer makes of it)."""
    generator = torch.Generator().manual_seed(1)
    x, grad = (torch.randn(SAMPLES, SEQ, HIDDEN, dtype=dtype, generator=generator) for _ in range(2))
    return x.requires_grad_(), grad


def trained(moe: MoE, loss: Tensor, x: Tensor) -> dict[str, Tensor]:
    """Gradients of x and of every parameter that has one."""
    wanted = {"x": x} | {name: p for name, p in moe.named_parameters() if p.requires_grad}
    return dict(zip(wanted, torch.autograd.grad(loss, list(wanted.values())), strict=True))


def by_loops(moe: MoE, x: Tensor) -> tuple[Tensor, Routing]:
    """What the layer is: sums over the kept assignments of each token, one after the other."""
    routing, experts = moe.router(x), moe.experts
    tokens = x.flatten(0, 1).unbind(0)
    sums = [torch.zeros_like(token) for token in tokens]
    for a in range(routing.tokens.numel()):
        token, expert = int(routing.tokens[a]), int(routing.experts[a])
        if routing.kept[a]:
            pairs = (experts.gate, experts.gate_bias), (experts.up, experts.up_bias)
            opened = [w[expert] @ tokens[token] + (0 if b is None else b[expert]) for w, b in pairs if w is not None]
            given = experts.down[expert] @ activate(experts.activation.kind, *opened)
            given = given if experts.down_bias is None else given + experts.down_bias[expert]
            sums[token] = sums[token] + routing.weights[a] * given
    y = torch.stack(sums).view(x.shape)
    return (y if moe.shared is None else y + moe.shared(x)), routing


@pytest.mark.parametrize(
    "sizes",
    [{}, {"activation": "swiglu", "shared_experts": 2, "expert_ffn": 6, "expert_bias": True}],
    ids=["default", "swiglu, a shared expert, biases"],
)
@pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS)
def test_output_and_gradients_are_those_of_loops(router: RouterConfig, sizes: dict[str, Any]) -> None:
    moe, (x, grad) = layer(router, **sizes), inputs()
    with dropout.scope(IDS):
        y = moe(x)
        found = trained(moe, (y * grad).sum(), x)
        expected, routing = by_loops(moe, x)
    loss = (expected * grad).sum()
    if routing.auxiliary is not None:
        loss = loss + SCALE * routing.auxiliary
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-13)
    for name, gradient in trained(moe, loss, x).items():
        torch.testing.assert_close(
            found[name], gradient, rtol=1e-10, atol=1e-12, msg=lambda text, n=name: f"{n} {text}"
        )
    dropped = int((~routing.kept).sum())
    assert (dropped > 0) == (router.capacity_factor is not None), "the case shows nothing"


def test_evaluation_has_no_auxiliary_loss() -> None:
    moe, (x, grad) = layer(RouterConfig(aux_coefficient=100.0)), inputs()
    gradients = [trained(moe.train(mode), (moe.train(mode)(x) * grad).sum(), x) for mode in (True, False)]
    assert not torch.equal(gradients[0]["router.weight"], gradients[1]["router.weight"])
    moe.train().auxiliary_scale = 0.0
    assert torch.equal(trained(moe, (moe(x) * grad).sum(), x)["router.weight"], gradients[1]["router.weight"])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_other_precisions_differ_by_their_rounding(precision: str) -> None:
    router = RouterConfig(top_k=EXPERTS)  # all of them: rounding cannot choose another
    exact, rounded = layer(router), layer(router, precision)
    dtype = getattr(torch, TABLE[precision].compute)
    with torch.no_grad():
        for target, source in zip(rounded.parameters(), exact.parameters()):
            source.copy_(target.copy_(source).double())
    (x, grad), tolerance = inputs(), 1e-5 if precision == "fp32" else 0.05
    narrow = x.detach().to(dtype).requires_grad_()
    y, expected = rounded(narrow), exact(x)
    assert y.dtype == dtype and rounded.router(narrow).weights.dtype == torch.float32
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)
    found, right = trained(rounded, (y * grad.to(dtype)).sum(), narrow), trained(exact, (expected * grad).sum(), x)
    for name, gradient in found.items():
        size = float(right[name].abs().max())
        torch.testing.assert_close(gradient.double(), right[name], rtol=0, atol=4 * tolerance * size)


def test_input_gradients_alone_and_weight_gradients_later_are_the_same() -> None:
    """As zero bubble asks: twice through one graph."""
    moe, (x, grad) = layer(ROUTERS["gshard"], shared_experts=1), inputs()
    with dropout.scope(IDS):
        loss = (moe(x) * grad).sum()
    whole = torch.autograd.grad(loss, [x, *moe.parameters()], retain_graph=True)
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    later = torch.autograd.grad(loss, list(moe.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(whole, (first, *later), strict=True))


# Products -------------------------------------------------------------------------------------------------------------


def test_fp64_and_lines_that_no_kernel_takes_go_expert_by_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_private, "grouped_product", None)
    counts = torch.tensor([1, 2])
    for inside, dtype in ((8, torch.float64), (3, torch.float32), (4, torch.bfloat16)):
        y = grouped_multiply(torch.ones(3, inside, dtype=dtype), torch.ones(2, 8, inside, dtype=dtype), counts)
        assert torch.equal(y, torch.full((3, 8), inside, dtype=dtype))


@pytest.mark.parametrize("activation", ["gelu", "relu", "swiglu"])
def test_equally_many_rows_are_one_batched_product(activation: str) -> None:
    biases = [f"{name}_bias" for name in (*(["gate"] if activation == "swiglu" else []), "up", "down")]
    experts = Experts(EXPERTS, HIDDEN, FFN, activation, torch.float64, biases).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    x = torch.randn(EXPERTS, 5, HIDDEN, dtype=torch.float64, generator=generator)
    sorted_rows = experts(x.flatten(0, 1), torch.full((EXPERTS,), 5))
    torch.testing.assert_close(experts(x), sorted_rows.view_as(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
def test_experts_without_any_row_still_give_every_weight_a_gradient(precision: str) -> None:
    moe, (x, grad) = layer(RouterConfig(), precision, activation="swiglu"), inputs()
    x = x.detach().flatten(0, 1).to(moe.experts.compute_dtype).requires_grad_()
    routing = moe.router(x.view(grad.shape))
    nobody = routing._replace(kept=torch.zeros_like(routing.kept))
    y, _ = LocalDispatcher()(x, nobody, moe.experts, None)
    assert y.shape == x.shape and (y == 0).all()
    for gradient in torch.autograd.grad(
        (y * grad.flatten(0, 1)).sum(), [x, moe.router.weight, *moe.experts.parameters()]
    ):
        assert (gradient == 0).all()


# What `plan` works from -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dense", "period", "expected"), [(0, 2, [1, 3, 5]), (0, 1, [0, 1, 2, 3, 4, 5]), (3, 1, [3, 4, 5]), (1, 3, [3])]
)
def test_the_last_layer_of_every_period_has_experts(dense: int, period: int, expected: list[int]) -> None:
    config = tiny_config(model__layers=6, model__experts=2, model__dense_layers=dense, model__expert_period=period)
    made = gpt.MODEL.make(config, 32)
    assert [index for index in range(6) if has_experts(index, config.model)] == expected
    layers = {layer.name for layer in made.layers() if layer.layer_role == "expert"}
    assert layers == {f"layers.{index}.moe.experts" for index in expected}


def test_flops_are_those_of_the_experts_that_a_token_goes_to() -> None:
    sizes = {"model.layers": 1, "model.expert_period": 1, "model.expert_ffn": 10, "model.activation": "swiglu"}
    config = tiny_config(
        {**sizes, "model.experts": 6, "model.shared_experts": 2, "model.router": RouterConfig(top_k=3)}
    )
    hidden, seq = config.model.hidden, config.model.seq
    products = 4 * hidden**2 + 6 * hidden + (3 + 2) * 3 * hidden * 10
    assert gpt.MODEL.make(config, 32).block("layers.0").forward_flops == 2.0 * products * seq + 4.0 * seq**2 * hidden


def test_experts_start_as_the_mlp_does() -> None:
    config = tiny_config(
        {"model.experts": 3, "model.layers": 8, "model.shared_experts": 1, "model.router.bias_rate": 0.1}
    )
    made = gpt.MODEL.make(config, 32).parameters
    std = {name: made[f"layers.1.moe.{name}"].initialiser.std for name in ("router.weight", "experts.up")}
    assert set(std.values()) == {0.02}
    for name in ("experts.down", "shared.down.weight"):
        assert made[f"layers.1.moe.{name}"].initialiser.std == 0.02 / 4  # the residual sum keeps its scale
    bias = made["layers.1.moe.router.selection_bias"]
    assert bias.frozen and bias.initialiser.kind == "zeros" and bias.shape == (3,)


@pytest.mark.parametrize(
    ("values", "key", "suggestion"),
    [
        ({"expert_period": 0}, "model.expert_period", "model.expert_period=2"),
        ({"expert_ffn": 0}, "model.expert_ffn", "model.expert_ffn=1"),
        ({"dense_layers": -1}, "model.dense_layers", "model.dense_layers=0"),
        ({"shared_experts": -1}, "model.shared_experts", "model.shared_experts=0"),
        ({"experts": -2}, "model.experts", "model.experts=0"),
        ({"dense_layers": 9}, "model.dense_layers", "model.dense_layers=2"),
        ({"expert_period": 5}, "model.expert_period", "model.expert_period=1"),
    ],
)
def test_impossible_sizes_are_refused(values: dict[str, int], key: str, suggestion: str) -> None:
    with pytest.raises(ConfigError) as error:
        tiny_plan({f"model.{name}": value for name, value in {"experts": 4, **values}.items()})
    (problem,) = error.value.problems
    assert (problem.where, problem.suggestion) == (key, suggestion)


def test_a_grid_refuses_experts_of_somebody_elses_module() -> None:
    spec = tiny_plan({"model.experts": 4}).spec
    assert spec.router is not None
    spec = replace(spec, router=replace(spec.router, kind=OWN))
    request = Request(narrow_config({"strategy.tensor.kind": "2d"}), spec, 1, 1, 4, 1, None)
    (problem,) = tensor_strategy("2d").check(request)
    assert (problem.kind, problem.suggestion) == ("not_built", "layout=1d") and "router of their own" in problem.what


@pytest.mark.parametrize(("sizes", "legal"), [({"model.expert_ffn": 9}, "tp=1 or model.expert_ffn=8"), ({}, None)])
def test_tp_divides_the_inside_of_every_expert(sizes: dict[str, int], legal: str | None) -> None:
    overrides = {"tp": 2, "model.experts": 4, "model.expert_period": 1, **sizes}
    if legal is None:  # the MLP's width is no matter where every layer has experts
        assert tiny_plan({**overrides, "model.ffn": 9, "model.expert_ffn": 8}).spec.ffn == 0
        return
    with pytest.raises(ConfigError) as error:
        tiny_plan(overrides)
    (problem,) = error.value.problems
    assert problem.kind == "arithmetic" and str(problem.suggestion).startswith(legal)
