"""The head and the loss in chunks of the tokens, so that the logits never exist at once (`loss_chunks`).

A chunk's logits give its part of the loss and, still in forward, its gradients, as in Liger Kernel (Hsu et al. 2024)
and torchtune: no logits are saved for backward, and none are computed twice. Saved instead are the gradients of the
head's input and weights, which backward multiplies by the gradient of the loss.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from parallelrun.models.autograd import apply
from parallelrun.models.functions import cast
from parallelrun.models.fused_norms import SoftCap
from parallelrun.models.layers import TensorModule, VocabHead


class _Logits(torch.autograd.Function):
    """The logits of a chunk. Backward adds the gradients of weight and bias to `sums` and returns that of the rows, so
    that no chunk has a tensor of the weight's size, unless the sum has another dtype."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, sums: tuple[Tensor | None, ...]) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.sums = sums
        return functional.linear(rows, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        rows, weight = ctx.saved_tensors
        of_weight, of_bias = ctx.sums
        if of_weight is not None:
            if of_weight.dtype == rows.dtype:
                of_weight.addmm_(grad.t(), rows)
            else:
                of_weight += grad.t() @ rows
        if of_bias is not None:
            of_bias += grad.sum(0)
        return grad @ weight, None, None, None


class _Attach(torch.autograd.Function):
    """Zero, whose gradient by `tensor` is `gradient`. A node for each tensor: schedules that split backward run the
    nodes of inputs and those of weights in different passes, and each only once."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, gradient: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return torch.zeros_like(loss)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient.mul_(grad), None, None


class ChunkedLoss(TensorModule):
    """`loss` of the logits of `head`, under a soft cap if there is one, in `chunks` of about equally many tokens. It
    reads the head's input, which a head that `defers` returns. The head is no submodule of it, so that its parameters
    keep their names."""

    def __init__(self, loss: nn.Module, head: VocabHead, chunks: int, softcap: float | None = None):
        super().__init__()
        self.loss, self.chunks, self.softcap = loss, chunks, softcap
        self._head = (head,)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """x (..., hidden), targets int64 (...) -> the sum over targets >= 0, a scalar in at least fp32."""
        (head,) = self._head
        rows = head.gathered(x).flatten(0, -2)
        with torch.no_grad():
            weight, bias = cast(head.weight, rows.dtype), None if head.bias is None else cast(head.bias, rows.dtype)
        chunks = list(zip(rows.detach().tensor_split(self.chunks), targets.flatten().tensor_split(self.chunks)))
        if not torch.is_grad_enabled():
            return torch.stack([self._loss(functional.linear(part, weight, bias), own) for part, own in chunks]).sum()
        parameters = [p if p is not None and p.requires_grad else None for p in (head.weight, head.bias)]
        sums = tuple(None if p is None else torch.zeros_like(p) for p in parameters)
        of_rows, losses = torch.empty_like(rows), []
        for (part, own), out in zip(chunks, of_rows.tensor_split(self.chunks)):
            part.requires_grad_()
            loss = self._loss(apply(_Logits, part, weight, bias, sums), own)
            losses.append(loss.detach())
            out.copy_(torch.autograd.grad(loss, part)[0])
        result = total = torch.stack(losses).sum()
        for tensor, gradient in ((rows, of_rows), *zip(parameters, sums)):
            if tensor is not None:
                result = result + apply(_Attach, tensor, gradient, total)
        return result

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        if self.softcap is not None:
            logits = apply(SoftCap, logits, self.softcap)
        loss: Tensor = self.loss(logits, targets)
        return loss


def defer_logits(network: Any, chunks: int) -> None:
    """Let the loss of `network` compute the logits too, in chunks. After a tensor strategy has replaced both."""
    heads = [module for module in network.modules() if isinstance(module, VocabHead)]
    if chunks > 1 and heads:
        (head,) = heads
        head.defers = True
        network.loss = ChunkedLoss(network.loss, head, chunks, network.spec.logit_softcap)
