"""The layer that stands in the place of an MLP: a router, experts, and maybe one MLP beside them that all tokens share.

Who goes to which expert is the router's (`routing.py`); how rows get to experts is a Dispatch's, which an expert
dispatcher
replaces by one that sends them to other ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from parallelrun.models.layers import Activation, Enter, Leave

from . import rows
from . import spec as sizes
from .experts import Experts
from .router import Router
from .routing import Routing

if TYPE_CHECKING:
    from parallelrun.model_spec import RouterSpec
    from parallelrun.models.gpt.network import Factory


class Dispatch(Protocol):
    """Brings rows to the experts and back."""

    def __call__(
        self, x: Tensor, routing: Routing, experts: Experts, beside: Callable[[], Tensor] | None
    ) -> tuple[Tensor, Tensor | None]:
        """x (T, hidden) -> (its tokens' weighted sums over what their experts give, a fresh tensor (T, hidden); what
        `beside` gives, which is called before the experts are: it does not wait for rows that are on their way)."""

    def take_bytes(self) -> int:
        """Payload of the all-to-alls since this was last asked."""


class LocalDispatch:
    """All experts are here: nothing is sent."""

    def __call__(
        self, x: Tensor, routing: Routing, experts: Experts, beside: Callable[[], Tensor] | None
    ) -> tuple[Tensor, Tensor | None]:
        extra = beside() if beside is not None else None
        order = rows.order_of(routing)
        given = experts(rows.spread(x, order), order.counts)
        return rows.combine(given, routing.weights, order), extra

    def take_bytes(self) -> int:
        return 0


class AuxiliaryLoss(torch.autograd.Function):
    """y as it is; in backward the auxiliary sum gets the gradient `scale`, as if scale x auxiliary were part of the
    loss. So a loss of a layer needs no way out of the network (nor out of a pipeline stage)."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, auxiliary: Tensor, scale: float) -> Tensor:
        ctx.scale, ctx.like = scale, (auxiliary.dtype, auxiliary.device)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        dtype, device = ctx.like
        return grad, torch.full((), ctx.scale, dtype=dtype, device=device), None


class Shared(nn.Module):
    """The MLP for all tokens beside the experts (DeepSeek-V3's shared experts as one); no dropout of its own."""

    def __init__(self, make: Factory):
        super().__init__()
        outputs = sizes.shared_expansions(make.model)
        self.up = make.columns(outputs)
        self.activation = Activation(make.model.activation)
        self.down = make.row(outputs["up"])

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(*self.up(x)))


class MoE(nn.Module):
    """x (batch, seq, hidden) -> the same shape. A token that no expert keeps gets 0: the residual carries it.

    dispatch: an expert dispatcher puts its own here. auxiliary_scale: what a routing group's auxiliary loss counts in
    the
    gradients; set before each step. Not compiled: how many rows an expert gets differs from step to step.
    """

    compiles: ClassVar[bool] = False

    def __init__(self, name: str, make: Factory, router: RouterSpec):
        super().__init__()
        model = make.model
        self.enter = Enter(make.dtype)
        self.router = Router(model.hidden, model.experts, router, make.seed, f"{name}.router", make.dtype)
        self.experts = Experts(model.experts, model.hidden, sizes.expert_ffn(model), model.activation, make.dtype)
        self.leave = Leave(make.dtype)
        self.shared = Shared(make) if model.shared_experts else None
        self.dropout = make.dropout(f"{name}.dropout")
        self.dispatch: Dispatch = LocalDispatch()
        self.auxiliary_scale = 0.0

    def forward(self, x: Tensor) -> Tensor:
        whole = self.enter(x)
        routing = self.router(whole)
        shared = self.shared
        beside = None if shared is None else lambda: shared(x)
        mixed, extra = self.dispatch(whole.flatten(0, 1), routing, self.experts, beside)
        y = self.leave(mixed, whole.size(0))
        if extra is not None:
            y = y + extra
        if routing.auxiliary is not None:
            y = AuxiliaryLoss.apply(y, routing.auxiliary, self.auxiliary_scale)
        return self.dropout(y)
