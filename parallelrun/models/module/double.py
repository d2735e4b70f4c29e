"""Keeps a module in fp64 under precision=fp64 that converts to fp32 in its own forward."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class StayDouble(TorchFunctionMode):
    """While entered, conversions of fp64 tensors to fp32 (norms, softmax, rotary tables) give fp64."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if function is Tensor.float:
                return args[0]
            args = tuple(torch.float64 if value is torch.float32 else value for value in args)
            kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in kwargs.items()}
        return function(*args, **kwargs)


def stay_double(module: nn.Module) -> None:
    """Make the module stay in fp64 in forward, so that `verify` sees no rounding of its own."""
    entered: list[ExitStack] = []

    def enter(*_: Any) -> None:
        entered.append(ExitStack())
        entered[-1].enter_context(StayDouble())

    def leave(*_: Any) -> None:
        entered.pop().close()

    module.register_forward_pre_hook(enter, prepend=True)
    module.register_forward_hook(leave, always_call=True)
