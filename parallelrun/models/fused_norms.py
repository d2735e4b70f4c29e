"""RMSNorm and SwiGLU as one autograd node each, which keeps for backward only what it reads.

Written as operations of torch, autograd keeps every intermediate result beside it: of a block of Llama 3 in 16 bit
19 of 53 bytes per token and feature of hidden. Their backward computes them again from what is kept, elementwise. A
compiled block chooses itself which tensors it saves, and gets torch's operations.
"""

from __future__ import annotations

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
