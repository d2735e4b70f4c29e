"""RMSNorm, gated activations and soft caps as one autograd node each, which keeps for backward only what it reads.

Written as operations of torch, autograd keeps every intermediate result beside it: of a block of Llama 3 in 16 bit
19 of 53 bytes per token and feature of hidden. Their backward computes them again from what is kept, elementwise. A
compiled block chooses itself which tensors it saves, and gets torch's operations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from parallelrun.distributed import torch_private


class RMSNorm(Function):
    """Keeps x, the weight and one number per row, as torch's fused kernel does, which exists on GPUs only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x (..., features), weight (features,) in the dtype of x, in which the result is, too; computed in at least
        fp32."""
        accurate = torch.promote_types(x.dtype, torch.float32)
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=accurate)
        rstd = norm.square_().div_(x.size(-1)).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, rstd)
        out: Tensor = (x * rstd).mul_(weight).to(x.dtype)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, rstd = ctx.saved_tensors
        wide, unit = weight.to(rstd.dtype), x * rstd
        product = unit * grad
        of_weight = product.flatten(0, -2).sum(0).to(weight.dtype)
        along = (product @ wide).unsqueeze(-1).div_(-x.size(-1))
        of_x = torch.mul(grad, wide, out=product).addcmul_(unit, along).mul_(rstd)
        return of_x.to(x.dtype), of_weight, None


class SwiGLU(Function):
    """silu(gate) * up. Keeps gate and up; backward computes silu(gate) again."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        """Both (..., features), of one dtype."""
        ctx.save_for_backward(gate, up)
        return functional.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return torch_private.silu_backward(grad * up, gate), functional.silu(gate).mul_(grad)


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) * up with GPT-2's tanh form (Shazeer 2020)."""
    return functional.gelu(gate, approximate="tanh") * up


def swiglu_clamped(gate: Tensor, up: Tensor) -> Tensor:
    """gpt-oss's activation (OpenAI 2025): g sigmoid(1.702 g) (u + 1) of g = gate up to 7 and u = up within +-7."""
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1.0)


class Gated(Function):
    """An activation `compute` of gate and up. Keeps both; backward computes it again."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[[Tensor, Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.compute = compute
        return compute(gate, up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            out = ctx.compute(*inputs)
        return (None, *torch.autograd.grad(out, inputs, grad))


class SoftCap(Function):
    """cap * tanh(x / cap) (Gemma 2, 2024). Keeps its result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cap: float) -> Tensor:
        out = torch.div(x, cap).tanh_().mul_(cap)
        ctx.save_for_backward(out)
        ctx.cap = cap
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (out,) = ctx.saved_tensors
        return (out / ctx.cap).square_().neg_().add_(1.0).mul_(grad), None
