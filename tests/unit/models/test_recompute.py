"""Recomputation: the same gradients to the last bit, dropout included, from fewer kept bytes."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from parallelrun.base.precision import TABLE
from parallelrun.config.schema.model_schema import RouterConfig
from parallelrun.models import initialise, recompute, rounding
from parallelrun.models.gpt import network, spec
from parallelrun.models.moe.layer import MoE
from parallelrun.models.network import Network, compile_blocks
from tests.live_bytes import LiveBytes
from tests.matrix import FULL
from tests.plans import tiny_config

GSHARD = RouterConfig(kind="gshard", second_expert="random", capacity_factor=1.0, jitter=0.1)
EXPERTS = {"model.experts": 4, "model.shared_experts": 1, "model.router": GSHARD}
LLAMA = {"model.norm": "rmsnorm", "model.activation": "swiglu", "model.position": "rope", "model.kv_heads": 2}
MODES = ("none", "selective", "full", "offload", recompute.KEPT)
TOKENS = torch.arange(16).view(2, 8)
SAMPLES = torch.tensor([5, 9])


def built(mode: str, overrides: dict[str, Any], precision: str = "fp64") -> Network:
    config = tiny_config({"dropout": 0.2, "model.layers": 2, **overrides})
    made = spec.MODEL.make(config, 32)
    gpt = network.build(config, made, TABLE[precision])
    with torch.no_grad():
        for name, parameter in gpt.named_parameters():
            parameter.copy_(initialise.logical(made.parameters[name], 1))
    gpt.rounds_weights = precision in ("bf16", "fp16")
    if mode == recompute.KEPT:  # what engines that split backward make of full
        gpt.recompute = mode
    else:
        recompute.apply(gpt, mode)
    for module in gpt.modules():
        if isinstance(module, MoE):
            module.auxiliary_scale = 0.5
    return gpt


def gradients(gpt: Network) -> tuple[float, dict[str, Tensor]]:
    loss = gpt.loss(gpt(TOKENS, SAMPLES), TOKENS)
    loss.backward()
    found = {name: parameter.grad for name, parameter in gpt.named_parameters() if parameter.grad is not None}
    assert len(found) == len(list(gpt.parameters()))
    return loss.item(), found


KINDS = {"gpt": {}, "llama": LLAMA, "attention dropout": {"model.attention_dropout": 0.1}, "experts": EXPERTS}


def chosen(modes: Sequence[Any], kinds: Sequence[str]) -> list[Any]:
    """Every mode with every kind of model; by default each mode and each kind in every second cell."""
    return [pytest.param(mode, KINDS[kind], id=f"{kind}-{mode}") for n, mode in enumerate(modes)
            for k, kind in enumerate(kinds) if FULL or (n + k) % 2 == 0]  # fmt: skip


@pytest.mark.parametrize(("mode", "overrides"), chosen(MODES[1:], [*KINDS]))
def test_gradients_are_bitwise_those_of_keeping_everything(mode: str, overrides: dict[str, Any]) -> None:
    loss, expected = gradients(built("none", overrides))
    again, found = gradients(built(mode, overrides))
    assert again == loss
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


PRECISIONS = [("none", "fp16"), *((mode, "bf16") for mode in MODES)]


@pytest.mark.parametrize(("how", "overrides"), chosen(PRECISIONS, ["gpt", "llama", "experts"]))
def test_rounding_again_in_backward_gives_the_bits_of_kept_copies(
    how: tuple[str, str], overrides: dict[str, Any]
) -> None:
    mode, precision = how
    keeps_copies = built("none", overrides, precision)
    keeps_copies.rounds_weights = False
    loss, expected = gradients(keeps_copies)
    again, found = gradients(built(mode, overrides, precision))
    assert again == loss
    for name, gradient in expected.items():
        assert found[name].dtype == torch.float32 and torch.equal(found[name], gradient), name


@pytest.mark.parametrize(("mode", "overrides"), chosen(MODES, ["gpt", "llama", "experts"]))
def test_a_microbatch_in_flight_keeps_no_rounded_weights(mode: str, overrides: dict[str, Any]) -> None:
    """Weights of a block are 12 x 64 x 64 numbers here, activations a few times 16 x 64."""
    held, wide = {}, {**overrides, "model.hidden": 64}
    for precision in ("fp32", "bf16"):
        gpt = built(mode, wide, precision)
        with LiveBytes() as counter:
            outputs = [gpt(TOKENS, SAMPLES) for _ in range(2)]
            held[precision] = counter.now
        assert outputs[0].requires_grad
    assert held["bf16"] <= held["fp32"]


def test_a_second_forward_drops_what_the_first_dropped() -> None:
    """The mask comes from the samples of *its* forward, even when other samples have been in scope since."""
    gpt = built("full", {})
    loss = gpt.loss(gpt(TOKENS, SAMPLES), TOKENS)
    gpt(TOKENS, SAMPLES + 100)
    loss.backward()
    _, expected = gradients(built("none", {}))
    for name, parameter in gpt.named_parameters():
        assert torch.equal(parameter.grad, expected[name]), name


def test_without_gradients_nothing_is_wrapped() -> None:
    gpt = built("full", {})
    with torch.no_grad():
        assert torch.equal(gpt(TOKENS, SAMPLES), built("none", {})(TOKENS, SAMPLES))


def test_an_unknown_mode_is_named() -> None:
    with pytest.raises(ValueError, match="recompute=some is unknown; use one of none, selective, full"):
        recompute.apply(built("none", {}), "some")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "full"] if FULL else ["full"])
def test_a_block_traces_in_one_piece(mode: str) -> None:
    """Dropout's scope, rotary positions and recomputation around it break no graph; numbers stay."""
    overrides = {**LLAMA, "model.layers": 1, "model.attention_dropout": 0.1}
    loss, expected = gradients(built("none", overrides))
    gpt = built(mode, overrides)
    gpt.block("layers.0").compile(backend="eager", fullgraph=True)
    again, found = gradients(gpt)
    assert again == pytest.approx(loss, rel=1e-12)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_experts_stay_out_of_the_graphs() -> None:
    from torch._dynamo.testing import CompileCounter

    overrides = {**EXPERTS, "model.layers": 2}
    loss, expected = gradients(built("none", overrides))
    gpt, counter = built("none", overrides), CompileCounter()
    compile_blocks(gpt, backend=counter)
    again, found = gradients(gpt)
    assert 0 < counter.frame_count < 8  # 16 with the layer of experts
    assert again == pytest.approx(loss, rel=1e-12)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-12)


def test_inputs_are_freed_with_what_is_computed_again_from_them():
    """Autograd keeps the packing hook until every tensor that went through it is freed."""
    x = torch.ones(4)
    kept = weakref.ref(x)
    with rounding.remembered() as copies:
        hook, y = copies.pack, x.exp()
        rounding.remember(y, torch.exp, x)
        packed = hook(y)
    del x, y
    assert torch.equal(rounding.unpack(packed), torch.ones(4).exp())
    source = weakref.ref(packed.source)
    del packed
    assert source() is None and kept() is None and callable(hook)
