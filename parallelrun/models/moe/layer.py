"""The layer with experts that replaces an MLP: a router, experts, and maybe a shared expert that sees every token.

The router assigns tokens to experts (`routing.py`). A token dispatcher brings them there; an expert-parallel strategy
replaces the local one by one that sends tokens to other ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from parallelrun.models.autograd import apply
from parallelrun.models.layers import ExpertInput, ExpertOutput, TensorModule, UnsplitLinear
from parallelrun.models.moe import rows
from parallelrun.models.moe import spec as sizes
from parallelrun.models.moe.experts import Experts
from parallelrun.models.moe.router import Router
from parallelrun.models.moe.routing import Routing
from parallelrun.models.transformer.modules import FeedForward, LayerFactory
from parallelrun.planner.model.model_spec.router import RouterSpec


class LocalDispatcher:
    """Brings tokens to the experts and combines the results. All experts are on this rank, so nothing is sent;
    expert-parallel strategies override it."""

    def __call__(
        self, x: Tensor, routing: Routing, experts: Callable[..., Tensor], beside: Callable[[], Tensor] | None
    ) -> tuple[Tensor, Tensor | None]:
        """x (T, hidden) -> (for each token the weighted sum of its experts' outputs, a new tensor (T, hidden); the
        result of `beside`, which is called before the experts, so that it overlaps with the dispatch)."""
        extra = beside() if beside is not None else None
        order = rows.order_of(routing)
        outputs = experts(rows.spread(x, order), order.counts)
        return rows.combine(outputs, routing.weights, order), extra

    def take_bytes(self) -> int:
        """Payload bytes of the all-to-alls in training since the last call."""
        return 0


class AuxiliaryLoss(torch.autograd.Function):
    """y unchanged; in backward `auxiliary` gets the gradient `scale`, as if scale x auxiliary were part of the loss. So
    the loss of a layer need not be passed out of the network or the pipeline stage."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, auxiliary: Tensor, scale: float) -> Tensor:
        ctx.scale, ctx.like = scale, (auxiliary.dtype, auxiliary.device)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        dtype, device = ctx.like
        return grad, torch.full((), ctx.scale, dtype=dtype, device=device), None


class MoE(TensorModule):
    """x (batch, seq, hidden) -> the same shape. A token that no expert keeps gets 0, and only the residual carries it.

    dispatch: set by an expert-parallel strategy. auxiliary_scale: the weight of a routing group's auxiliary loss in the
    gradients; set before each step. Not compiled: the number of tokens of an expert differs from step to step.
    """

    uncompiled: ClassVar[tuple[str, ...]] = ("forward",)

    def __init__(self, name: str, make: LayerFactory, router: RouterSpec):
        super().__init__()
        model = make.model
        self.enter = ExpertInput(make.dtype)
        site, biases = f"{name}.router", sizes.expert_biases(model)
        self.router = Router(model.hidden, model.experts, router, make.seed, site, make.dtype, bool(biases))
        ffn = sizes.expert_ffn(model)
        self.experts = Experts(model.experts, model.hidden, ffn, model.activation, make.dtype, biases)
        self.leave = ExpertOutput(make.dtype)
        # an MLP for all tokens beside the experts (DeepSeek-V3's shared experts as one), without dropout of its own
        self.shared = FeedForward(make, sizes.shared_ffn(model), None) if model.shared_experts else None
        self.shared_gate = UnsplitLinear(model.hidden, 1, False, make.dtype) if model.shared_gate else None
        self.dropout = make.dropout(f"{name}.dropout")
        self.dispatch = LocalDispatcher()
        self.auxiliary_scale = 0.0

    def forward(self, x: Tensor) -> Tensor:
        gathered = self.enter(x)
        routing: Routing = self.router(gathered)
        shared = self.shared
        beside = None if shared is None else lambda: shared(x)
        mixed, extra = self.dispatch(gathered.flatten(0, 1), routing, self.experts, beside)
        y = self.leave(mixed, gathered.size(0))
        if extra is not None:
            y = y + (extra if self.shared_gate is None else torch.sigmoid(self.shared_gate(x)) * extra)
        if routing.auxiliary is not None:
            y = apply(AuxiliaryLoss, y, routing.auxiliary, self.auxiliary_scale)
        return self.dropout(y)
