"""What a transformer block keeps for backward, per token; and the two nodes that keep only what they read."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional

from parallelrun.models import functions
from parallelrun.planner.memory.backward_block import backward_block
from parallelrun.planner.resolve.resolve_config import resolve
from parallelrun.training.loop.build import build
from tests.peak_bytes import PeakBytes
from tests.plans import tiny_config

HIDDEN, SEQ, BATCH = 128, 256, 2
GPT: dict[str, Any] = {
    "model.layers": 2, "model.hidden": HIDDEN, "model.heads": 4, "model.seq": SEQ, "model.ffn": 4 * HIDDEN,
    "global_batch": BATCH, "micro_batch": BATCH, "precision.name": "bf16",
}  # fmt: skip
LLAMA = GPT | {
    "model.norm": "rmsnorm", "model.activation": "swiglu", "model.position": "rope", "model.bias": False,
    "model.tied_embeddings": False, "model.kv_heads": 1, "model.ffn": 7 * HIDDEN // 2,
}  # fmt: skip
SELECTIVE = {"recompute": "selective"}
# Bytes per token and feature of hidden. Llama 3 8B's proportions: the inputs of both norms 4, of q, k and v 2; q, k and
# v 3; attention's result 2, and 2 for the copy that grouped heads take on a CPU; the input of gate and up 2; gate and
# up 14, their product 7. GPT: 6 for q, k and v, no copy, 8 for up and 8 for gelu(up); two dropout masks 2 (Korthikanti
# et al. 2022, equation 2). Selective recomputation leaves out what norms and the activation give.
CASES = {
    "llama": (LLAMA, 36),
    "llama selective": (LLAMA | SELECTIVE, 36 - 4 - 7),
    "llama fp32": (LLAMA | {"precision.name": "fp32"}, 72),
    "gpt": (GPT, 32),
    "gpt dropout": (GPT | {"dropout": 0.1}, 34),
}
FEW = 1.5  # statistics of norms and attention, and the angles of rotary positions


@pytest.mark.parametrize("case", CASES)
def test_a_block_keeps_no_more_than_its_products_and_norms_read(case: str) -> None:
    overrides, expected = CASES[case]
    config = tiny_config(overrides)
    plan = resolve(config)
    training = build(config, plan, torch.device("cpu"))
    (network,) = training.model_parts
    network.block_names = ("layers.1",)
    x = torch.randn(BATCH, SEQ, HIDDEN, dtype=getattr(torch, plan.precision.compute)).requires_grad_()
    with PeakBytes() as live:
        live.see_all()
        before = live.now
        out = network(x, torch.arange(BATCH))
        kept = live.now - before - out.untyped_storage().nbytes() + x.untyped_storage().nbytes()
    training.close()
    tokens_and_features = BATCH * SEQ * HIDDEN
    assert expected <= kept / tokens_and_features < expected + FEW
    assert kept == pytest.approx(backward_block("layers.1", plan, False).kept, rel=0.002)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_gradients_are_those_of_torchs_own_operations(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, other, grad = (torch.randn(2, 5, 96, dtype=torch.float64).to(dtype) for _ in range(3))
    weight = torch.randn(96, dtype=torch.float64).to(dtype)

    def found(compute: Any, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = [one.clone().requires_grad_() for one in inputs]
        out = compute(*leaves)
        return out, *torch.autograd.grad(out, leaves, grad.to(out.dtype))

    norm = partial(functions.normalise, "rmsnorm", bias=None, eps=1e-5)
    pairs: list[tuple[Any, Any, Any]] = [
        (norm, lambda x, weight: functional.rms_norm(x, (96,), weight, 1e-5), (x, weight)),
        (partial(functions.activate, "swiglu"), lambda gate, up: functional.silu(gate) * up, (x, other)),
    ]
    for ours, torchs, inputs in pairs:
        exact = found(torchs, *(one.double() for one in inputs))
        for one, wanted in zip(found(ours, *inputs), exact, strict=True):
            assert one.dtype == dtype
            bound = 1e-13 if dtype == torch.float64 else 2**-7
            torch.testing.assert_close(one.double(), wanted, rtol=bound, atol=bound)
